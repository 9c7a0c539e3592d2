"""The frozen base of a training run: float32, bfloat16, or quantized to NF4."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from ss_device.base_model import BaseFolder
from ss_device.errors import UserError
from ss_device.reference.hugging_face import NO_CODE, plain_config
from ss_device.reference.stream_model import load_base
from ss_device.training.schedule import AdapterSchedule


def check_quantization(schedule: AdapterSchedule) -> None:
    """Raise UserError where the base cannot be quantized as the schedule says."""
    if schedule.quantize_base and find_spec("bitsandbytes") is None:
        raise UserError("quantize-base nf4 needs bitsandbytes (pip install 'ss-device[cuda]')")


def load_training_base(
    base: BaseFolder, schedule: AdapterSchedule, device: torch.device | str = "cpu"
) -> nn.Module:
    """The base as a frozen Hugging Face model, quantized on `device` or as it is on the CPU.

    bf16 precision halves the frozen weights' memory; NF4 (v2 App. J) quarters it again, computing in
    bfloat16 (`AdapterSchedule.computes_in_half`). What is trained stays in float32 either way.
    """
    check_quantization(schedule)
    if schedule.quantize_base:
        return _quantized(base, device)
    return load_base(base, "bfloat16" if schedule.precision == "bf16" else "float32")


def _quantized(base: BaseFolder, device: torch.device | str) -> nn.Module:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if base.is_packed:
        raise UserError(f"{base.path}: is quantized already; leave --quantize-base out")

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        base.path,
        config=plain_config(base.path),
        quantization_config=settings,
        dtype=torch.bfloat16,
        device_map={"": device},
        **NO_CODE,
    )
    return model.eval().requires_grad_(False)
