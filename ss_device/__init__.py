"""Speculative Streaming on device: the method, its reference and its training.

    from ss_device import load_adapter, train_adapter

Names are loaded when they are asked for: `import ss_device` loads no framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ss_device.adapter import load_adapter as load_adapter
    from ss_device.config import SpeculativeConfig as SpeculativeConfig
    from ss_device.python_api import train_adapter as train_adapter
    from ss_device.training.schedule import AdapterSchedule as AdapterSchedule
    from ss_device.training.settings import AdapterInputs as AdapterInputs

_PLACES = {
    "AdapterInputs": "ss_device.training.settings",
    "AdapterSchedule": "ss_device.training.schedule",
    "SpeculativeConfig": "ss_device.config",
    "load_adapter": "ss_device.adapter",
    "train_adapter": "ss_device.python_api",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'ss_device' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
