"""Training checkpoints without pickles: tensors as safetensors, the rest as JSON, replaced in one go."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from ss_device.errors import UserError, library_errors
from ss_device.outputs import folder_in_one_go, recover_folder
from ss_device.strict_json import read_json

ADAM = {"step", "exp_avg", "exp_avg_sq"}


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    record: dict,
    write: bool = True,
) -> None:
    """Write trainable tensors, optimizer state, the CPU generator and `record` (JSON) to `folder`.

    Written beside `folder` first and then renamed, so a killed run leaves the previous checkpoint.
    Processes that share a sharded model all call it, and one of them has `write` set.
    """
    tensors = {n: _whole(p) for n, p in trainable(model).items()}
    states = _optimizer_tensors(optimizer)
    if not write:
        return
    with folder_in_one_go(folder) as temporary:
        save_file(tensors, temporary / "model.safetensors")
        save_file(states, temporary / "optimizer.safetensors")
        save_file({"cpu": torch.get_rng_state()}, temporary / "random.safetensors")
        (temporary / "record.json").write_text(json.dumps(record, indent=1))


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict | None:
    """Restore what `save_checkpoint` wrote and return its record; None when there is no checkpoint.

    Raises UserError when the checkpoint's tensors are not those of `model`.
    """
    recover_folder(folder)
    if not folder.exists():
        return None
    _load_tensors(folder, model)
    states = _read(folder / "optimizer.safetensors")
    with library_errors(f"{folder / 'optimizer.safetensors'}: not the optimizer's state"):
        _restore_optimizer(optimizer, states)
    with library_errors(f"{folder / 'random.safetensors'}: not a generator's state"):
        torch.set_rng_state(_read(folder / "random.safetensors")["cpu"])
    return read_json(folder / "record.json")


def check_step(step: int, steps: int, folder: Path) -> None:
    """UserError for a checkpoint of a run in `folder` that lies behind the run's `steps`."""
    if step > steps:
        raise UserError(f"{folder / 'checkpoint'}: record.json: step {step} of a run of {steps} steps")


def save_best(folder: Path, model: torch.nn.Module, write: bool = True) -> None:
    """Write the trainable tensors alone, replacing those of an earlier call (`write`: see above)."""
    tensors = {n: _whole(p) for n, p in trainable(model).items()}
    if write:
        with folder_in_one_go(folder) as temporary:
            save_file(tensors, temporary / "model.safetensors")


def load_best(folder: Path, model: torch.nn.Module) -> None:
    """Inverse of `save_best`."""
    recover_folder(folder)
    _load_tensors(folder, model)


def copy_trainable(sharded: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Copy the trained tensors of a model that FSDP has cut up into an ordinary one like it."""
    tensors = {n: _whole(p) for n, p in trainable(sharded).items()}
    with torch.no_grad():
        for name, parameter in trainable(whole).items():
            parameter.copy_(tensors[name])


def _read(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with library_errors(f"{path}: not a readable safetensors file"):
        tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{path}: '{name}' holds numbers that are not finite")
    return tensors


def _load_tensors(folder: Path, model: torch.nn.Module) -> None:
    tensors = _read(folder / "model.safetensors")
    parameters = trainable(model)
    if {n: t.shape for n, t in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
        raise UserError(f"{folder}: the checkpoint belongs to another configuration")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_placed_like(tensors[name], parameter))


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole value on the CPU, gathered from all processes when it is sharded (FSDP)."""
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return whole.contiguous().cpu()


def _placed_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`tensor` sharded like `parameter`, when that is."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        tensor = tensor.to(parameter.device)
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": _whole(torch.as_tensor(value))
        for index, entry in state.items()
        for key, value in entry.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Raises what its depths do where the tensors are not of this optimizer."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        parameter = parameters[int(index)]
        placed = _placed_like(tensor, parameter)
        if placed.ndim and placed.shape != parameter.shape:
            raise ValueError(f"'{name}' has shape {tuple(placed.shape)}, expected {tuple(parameter.shape)}")
        state.setdefault(int(index), {})[key] = placed
    if any({*entry} != ADAM for entry in state.values()):
        raise ValueError(f"a parameter has other states than {', '.join(sorted(ADAM))}")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
