"""The processes of a training run, as accelerate joins them."""

from __future__ import annotations

import os

from accelerate import Accelerator

from ss_device.errors import UserError


def joined_processes() -> Accelerator:
    """The Accelerator; UserError where processes were launched that accelerate could not join."""
    accelerator, started = Accelerator(), int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise UserError(
            f"{started} processes were started, but accelerate joins {accelerator.num_processes}: "
            "without a GPU launch them with --cpu"
        )
    return accelerator
