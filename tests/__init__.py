"""Tests. PyTorch computes on the CPU in them, whatever else is there: some compare bytes."""

import os

os.environ.setdefault("SS_DEVICE", "cpu")
