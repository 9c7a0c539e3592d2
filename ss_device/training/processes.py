"""The processes of a training run, as accelerate joins them."""

from __future__ import annotations

import os

from accelerate import Accelerator

from ss_device.errors import UserError
from ss_device.reference.device import chosen_device


def joined_processes(device: str | None = None) -> Accelerator:
    """The Accelerator on `device`; None: as accelerate was launched, on a GPU where there is one.

    UserError where that is not there, and where processes were launched that accelerate could not join.
    """
    if device is not None:
        chosen_device(device)
    accelerator, started = Accelerator(cpu=device == "cpu"), int(os.environ.get("WORLD_SIZE", "1"))
    if device not in (None, accelerator.device.type):
        raise UserError(f"--device {device}: accelerate computes on {accelerator.device.type} here")
    if started != accelerator.num_processes:
        raise UserError(
            f"{started} processes were started, but accelerate joins {accelerator.num_processes}: "
            "without a GPU launch them with --cpu"
        )
    return accelerator
