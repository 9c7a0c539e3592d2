"""The reference on other base weights than the folder's, such as those a compressed package holds."""

from __future__ import annotations

import numpy as np
import torch

from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.reference.hugging_face import fill, load_base
from ss_device.reference.stream_model import StreamModel, attach_adapter


def with_weights(
    base: BaseFolder,
    weights: dict[str, np.ndarray],
    adapter: Adapter,
    device: torch.device | str = "cpu",
) -> StreamModel:
    """Base and adapter in float32 and evaluation mode on `device`, base parameters from `weights`.

    weights: canonical names (`Architecture.weight_shapes`). Raises UserError where they do not fit.
    """
    adapter.check_base(base)
    model = load_base(base)
    fill(model, weights, base.architecture)
    return attach_adapter(model.to(device), base.architecture, adapter)
