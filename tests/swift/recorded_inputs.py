"""Recorded inputs of the Core ML step function, as the Python step model fills them over some commits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device.architecture import Architecture
from ss_device.bundle import StepFunctions
from ss_device.config import SpeculativeConfig
from ss_device.tree import tree_from_parents
from ss_runtime.function_step_model import FunctionStepModel
from tests.swift.recorded_columns import Columns


class SilentEngine:
    """Stands for a package: where it prunes it drops node 1, so that rows are not node ids."""

    def __init__(self, nodes: int, kept: int) -> None:
        self.nodes, self.kept = nodes, kept

    def make_state(self):
        return None

    def predict(self, inputs, state):
        kept = np.delete(np.arange(self.nodes), 1 if self.kept < self.nodes else [])[: self.kept]
        return {"kept": kept, "chosen": kept, "accepted": 0, "stream_logits": np.zeros((2, 4))}


def export_inputs(path: Path) -> None:
    """What `FunctionStepModel` hands to the step function over some commits."""
    rng = np.random.default_rng(4)
    columns = Columns()
    shape = Architecture("llama", 99, 8, 8, 1, 1, 1, 8, 1e-6, 1e4, 64, True)  # of which only V matters
    for nodes, kept in ((8, 8), (8, 5)):
        functions = StepFunctions("", "", "", 4, nodes, kept, 40)
        engine = SilentEngine(nodes, kept)
        model = FunctionStepModel(engine, engine, functions, SpeculativeConfig(num_streams=2), shape)
        model.prefill([3, 4, 5, 6, 7, 8])
        for _ in range(10):
            size = int(rng.integers(1, nodes + 1))
            parents = [-1, *(int(rng.integers(0, node)) for node in range(1, size))]
            tree = tree_from_parents(rng.integers(0, 99, size), parents)
            slot, commit_nodes, commit_rows = model._accepted
            columns.add(limits=[nodes, kept, 40], length=model.length, slot=slot)
            columns.add(
                nodes=commit_nodes, rows=commit_rows, tree_tokens=tree.tokens, tree_parents=tree.parents
            )
            inputs = model.step_inputs(tree)
            columns.add(np.uint8, mask=np.packbits(inputs.pop("mask") == 0))
            inputs.setdefault("commit_rows", np.zeros(0, np.int32))
            columns.add(**{f"input_{name}": value for name, value in inputs.items()})
            verified = model.step(tree)
            within = [n for n in verified.kept if n < size]
            model.commit([0] if len(within) < 2 or rng.random() < 0.4 else [0, int(within[-1])])
    save_file(columns.arrays(), path)
