"""The table of operations: MIL op name -> numpy function, filled by the `@op` decorator."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .graph import TensorType


@dataclass(frozen=True)
class OpDefinition:
    """One implemented operation.

    function  called as function(call, **parameters); returns an array, a tuple of arrays or None
    tuples    parameters that are lists even when the file binds a single value
    view      a result may share memory with an input (or with a state)
    exact     results are copies of input values, so rounding them again would change nothing
    control   called as function(call, run_block, **parameters)
    """

    name: str
    function: Callable
    tuples: frozenset[str] = frozenset()
    view: bool = False
    exact: bool = False
    control: bool = False


@dataclass
class Call:
    """What an operation may know about its place in a prepared program.

    opset     number of the Core ML opset of its function (5 is iOS 15 ... 8 is iOS 18)
    in_place  slice_update only: the input's memory is dead afterwards and may be reused
    owned     write_state only: the value's memory belongs to nobody else and may be kept
    """

    type: str
    name: str
    outputs: tuple[TensorType, ...]
    opset: int
    dtype: str
    in_place: bool = False
    owned: bool = False
    blocks: list = field(default_factory=list)


REGISTRY: dict[str, OpDefinition] = {}


def op(
    *names: str,
    tuples: tuple[str, ...] = (),
    view: bool = False,
    exact: bool | None = None,
    control: bool = False,
) -> Callable[[Callable], Callable]:
    """Register a function as the implementation of the MIL ops `names` (see OpDefinition).

    `exact` defaults to `view`: an operation that only looks at memory differently copies values.
    """
    is_exact = view if exact is None else exact

    def register(function: Callable) -> Callable:
        for name in names:
            REGISTRY[name] = OpDefinition(name, function, frozenset(tuples), view, is_exact, control)
        return function

    return register
