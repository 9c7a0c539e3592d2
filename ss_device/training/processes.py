"""The processes of a training run, as accelerate joins them."""

from __future__ import annotations

import os

from accelerate import Accelerator

from ss_device.errors import UserError
from ss_device.reference.device import asked_for, chosen_device


def joined_processes(device: str | None = None) -> Accelerator:
    """The Accelerator on `device`; None: SS_DEVICE, else as accelerate was launched, else a GPU's.

    UserError where that is not there, and where processes were launched that accelerate could not join.
    """
    kind = chosen_device(device).type if asked_for(device) else None
    accelerator, started = Accelerator(cpu=kind == "cpu"), int(os.environ.get("WORLD_SIZE", "1"))
    if kind not in (None, accelerator.device.type):
        raise UserError(f"--device {kind}: accelerate computes on {accelerator.device.type} here")
    if started != accelerator.num_processes:
        raise UserError(
            f"{started} processes were started, but accelerate joins {accelerator.num_processes}: "
            "without a GPU launch them with --cpu"
        )
    return accelerator
