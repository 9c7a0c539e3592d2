"""A second device on a machine that has only a CPU: PyTorch's own rules of devices, with real values.

An operation's devices are decided by `FakeTensorMode`, which refuses what a GPU refuses; CPU tensors give
the values. So code meets a `cuda` or `mps` device, and what it says there can be compared with what it says
on a CPU, number by number.

To C++ a tensor on it is a meta tensor: of the devices that a CPU build knows it is the one besides `cpu`
that autograd can differentiate on.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
NO_DRIVER = "PyTorch is not linked with support for"
NOT_ON_MPS = (torch.float64, torch.complex128)


class PlacedTensor(torch.Tensor):
    """A tensor on the stand-in device. value: the same on the CPU."""

    @staticmethod
    def __new__(cls, value: torch.Tensor, place: torch.device):
        self = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, value.stride(), value.storage_offset(), dtype=value.dtype, device="meta"
        )
        self.value, self.place = value, place
        return self

    @property
    def device(self):
        return self.place

    @property
    def is_cuda(self):
        return self.place.type == "cuda"

    @property
    def is_meta(self):
        return False

    def tolist(self):
        return self.value.tolist()

    def numpy(self, **_):
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def __repr__(self):
        return f"PlacedTensor({self.value!r}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function}: the stand-in device has been left")


class StandInDevice(TorchDispatchMode):
    """While entered, tensors may be made on and moved to device `kind` (`cuda`, `mps`).

    operations: how many had an input there, so that a test can tell that it met the device.
    """

    def __init__(self, kind: str = "cuda") -> None:
        super().__init__()
        self.device, self.operations = torch.device(kind, 0), 0
        self._rules, self._calls = _Rules(), _Calls(self.device)
        self._known: dict[tuple, list | None] = {}

    def __enter__(self):
        # A module that is moved keeps its parameters' identity, as with a real device.
        self._swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        self._calls.__enter__()
        self._rules.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._rules.__exit__(*error)
        self._calls.__exit__(*error)
        torch.__future__.set_swap_module_params_on_conversion(self._swaps)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves, layout = pytree.tree_flatten((args, kwargs or {}))
        leaves = [self._named(x) for x in leaves]
        inputs = [x for x in leaves if isinstance(x, PlacedTensor)]
        self.operations += bool(inputs)
        places = self._places(function, leaves, layout)
        on_cpu = pytree.tree_unflatten([_value(x) for x in leaves], layout)
        with unset_fake_temporarily():
            values = function(*on_cpu[0], **on_cpu[1])
        found, layout = pytree.tree_flatten(values)
        places = [self.device] * len(found) if places is None else places
        placed = [self._placed(v, p, inputs) for v, p in zip(found, places, strict=True)]
        return pytree.tree_unflatten(placed, layout)

    def _named(self, x):
        """A meta device that C++ took from a tensor's own options is this one."""
        own = isinstance(x, torch.device) and x.type == "meta" and self._calls.own
        return self.device if own else x

    def _places(self, function, leaves: list, layout) -> list | None:
        """Devices of an operation's results; None where its shapes depend on values, so that all are here.

        What decides it is the operation and, of each input, the device and whether it is a single number.
        """
        key = (function, layout, *map(_placement, leaves))
        if key not in self._known:
            self._known[key] = self._rule(function, leaves, layout)
        return self._known[key]

    def _rule(self, function, leaves: list, layout) -> list | None:
        fakes = [self._fake(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(fakes, layout)
        try:
            results = pytree.tree_leaves(function(*args, **kwargs))
            return [x.device if isinstance(x, torch.Tensor) else None for x in results]
        except DEPENDS_ON_VALUES:
            return None
        except RuntimeError as error:
            if NO_DRIVER not in str(error):
                raise
        FakeTensor._find_common_device(function, fakes)
        return None

    def _fake(self, tensor: torch.Tensor) -> FakeTensor:
        with unset_fake_temporarily():
            shape = torch.empty_like(_value(tensor), device="meta", requires_grad=False)
        return FakeTensor(self._rules, shape, tensor.device)

    def _placed(self, value, place: torch.device | None, inputs: list[PlacedTensor]):
        """A result where the rules put it."""
        if not isinstance(value, torch.Tensor) or place is None or place.type in ("cpu", "meta"):
            return value
        if place.type == "mps" and value.dtype in NOT_ON_MPS:
            raise TypeError(f"Cannot convert a MPS Tensor to {value.dtype} dtype")
        same = [x for x in inputs if x.value is value]
        return same[0] if same else PlacedTensor(value, place)


class _Rules(FakeTensorMode):
    avoid_device_init = True  # also where a test says that PyTorch finds a GPU


class _Calls(TorchFunctionMode):
    """Calls as Python makes them. `cuda` becomes `cuda:0`, whose index C++ would ask a driver for.

    own: whether one of them that is under way has an argument on the device. One that neither has such an
    argument nor names the device is none of its business.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.own = device, False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        leaves, layout = pytree.tree_flatten((args, kwargs))
        before, placed = self.own, any(isinstance(x, PlacedTensor) for x in leaves)
        if not placed and not any(map(self._is_it, leaves)):
            with _disable_current_modes():
                return function(*args, **kwargs)
        args, kwargs = pytree.tree_unflatten([self.device if self._is_it(x) else x for x in leaves], layout)
        self.own = before or placed
        try:
            return function(*args, **kwargs)
        finally:
            self.own = before

    def _is_it(self, x) -> bool:
        return isinstance(x, torch.device | str) and str(x).partition(":")[0] == self.device.type


def _placement(x):
    """What of an argument decides where results are."""
    if isinstance(x, torch.Tensor):
        return (x.device, x.ndim == 0)
    return x if isinstance(x, torch.device) else None


def _value(x):
    if isinstance(x, PlacedTensor):
        return x.value
    return torch.device("cpu") if isinstance(x, torch.device) and x.type != "meta" else x
