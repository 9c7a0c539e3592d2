"""Where PyTorch computes: the device asked for, or the best that is there."""

from __future__ import annotations

import os

import torch

from ss_device.errors import UserError

VARIABLE = "SS_DEVICE"


def chosen_device(wanted: str | None = None) -> torch.device:
    """`wanted` (`cpu`, `cuda`, `mps`); None: what SS_DEVICE says, else a GPU if there is one (CUDA, Metal).

    float32 stays float32: TF32 products, which round to 10 bits, are switched off. Raises UserError for a
    device that is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = asked_for(wanted) or next(name for name, found in there.items() if found)
    option = f"--device {name}" if wanted else f"{VARIABLE}={name}"
    if name not in there:
        raise UserError(f"{option} is not one of {', '.join(there)}")
    if not there[name]:
        found = ", ".join(other for other in there if there[other])
        raise UserError(f"{option}: PyTorch {torch.__version__} finds none here (it has {found})")
    torch.set_float32_matmul_precision("highest")
    return torch.device(name)


def asked_for(wanted: str | None) -> str | None:
    """The device that an option or the environment names; None where neither does."""
    return wanted or os.environ.get(VARIABLE) or None


def device_text(device: torch.device) -> str:
    """The device with its name, as `cuda (NVIDIA L4)`."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type
