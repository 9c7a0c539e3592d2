"""Where PyTorch computes: the device asked for, or the best that is there."""

from __future__ import annotations

import torch

from ss_device.errors import UserError


def chosen_device(wanted: str | None = None) -> torch.device:
    """`wanted` (`cpu`, `cuda`, `mps`); None: CUDA where there is a GPU, else Metal, else the CPU.

    float32 stays float32: TF32 products, which round to 10 bits, are switched off. Raises UserError for a
    device that is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = wanted or next(name for name, found in there.items() if found)
    if name not in there:
        raise UserError(f"--device {name} is not one of {', '.join(there)}")
    if not there[name]:
        found = ", ".join(other for other in there if there[other])
        raise UserError(f"--device {name}: PyTorch {torch.__version__} finds none here (it has {found})")
    torch.set_float32_matmul_precision("highest")
    return torch.device(name)


def device_text(device: torch.device) -> str:
    """The device with its name, as `cuda (NVIDIA H200)`."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type
