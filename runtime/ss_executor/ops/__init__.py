"""The operations, grouped by theme. Importing this package fills `registry.REGISTRY`.

An operation is a function (call, **parameters of the MIL op). Float arrays arrive as float32,
whatever their declared type; the caller converts and rounds the result to the declared type.
"""

from . import (  # noqa: F401
    activation,
    compressed,
    control,
    convolution,
    elementwise,
    gathering,
    linear,
    normalization,
    ordering,
    pooling,
    rearrange,
    reduction,
    resizing,
    slicing,
    states,
    tensor,
)
