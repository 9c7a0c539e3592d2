"""Training checkpoints without pickles: tensors as safetensors, the rest as JSON, replaced in one go."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ss_device.errors import UserError


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, record: dict
) -> None:
    """Write trainable tensors, optimizer state, the CPU generator and `record` (JSON) to `folder`.

    Written beside `folder` first and then renamed, so a killed run leaves the previous checkpoint.
    """
    temporary = folder.with_name(folder.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {n: p.detach().contiguous().cpu() for n, p in trainable(model).items()}
    save_file(tensors, temporary / "model.safetensors")
    save_file(_optimizer_tensors(optimizer), temporary / "optimizer.safetensors")
    save_file({"cpu": torch.get_rng_state()}, temporary / "random.safetensors")
    (temporary / "record.json").write_text(json.dumps(record, indent=1))
    previous = folder.with_name(folder.name + ".previous")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        os.replace(folder, previous)
    os.replace(temporary, folder)
    shutil.rmtree(previous, ignore_errors=True)


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
    """Restore what `save_checkpoint` wrote and return its record; None when there is no checkpoint.

    Raises UserError when the checkpoint's tensors are not those of `model`.
    """
    previous = folder.with_name(folder.name + ".previous")
    if not folder.exists() and previous.exists():
        os.replace(previous, folder)
    if not folder.exists():
        return None
    tensors = load_file(folder / "model.safetensors")
    parameters = trainable(model)
    if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
        raise UserError(f"{folder}: the checkpoint belongs to another configuration")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    _restore_optimizer(optimizer, load_file(folder / "optimizer.safetensors"))
    torch.set_rng_state(load_file(folder / "random.safetensors")["cpu"])
    return json.loads((folder / "record.json").read_text())


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": torch.as_tensor(value).detach().contiguous().cpu()
        for index, entry in state.items()
        for key, value in entry.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
