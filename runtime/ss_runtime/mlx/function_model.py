"""The step model over an exported file: it knows the file and the table in `function_export` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ss_device.bundle import Bundle, BundledAdapter, MLXFunctions
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError, library_errors
from ss_device.step_checks import check_prompt, check_tree, kept_rows
from ss_device.step_model import Choose, Proposal, StepLimits, Verified
from ss_device.tree import DraftTree, root_only


class FunctionModel:
    """`ss_device.step_model.StepModel` over an imported file."""

    def __init__(
        self,
        path: Path,
        functions: MLXFunctions,
        config: SpeculativeConfig,
        shape: tuple[int, int, int],
        vocab_size: int,
    ) -> None:
        """shape: layers, key/value heads, head size. Raises UserError for a file that MLX cannot read."""
        self._path = path
        with library_errors(f"{path}: not a readable MLX function"):
            self._run = mx.import_function(str(path))
        self.limits = StepLimits(
            functions.num_nodes,
            functions.num_kept,
            config.num_streams,
            functions.context,
            greedy_only=True,
            vocab_size=vocab_size,
        )
        layers, heads, size = shape
        dtype = getattr(mx, functions.dtype)
        self._functions = functions
        self._buffers = [mx.zeros((layers, heads, functions.slots, size), dtype)] * 2
        self._length, self._kept = 0, None

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None) -> Proposal:
        """As `StepModel.prefill`; the last chunk is padded."""
        check_prompt(self.limits, tokens)
        self._length, self._kept = 0, None
        chunk, before = self._functions.chunk, list(tokens[:-1])
        for start in range(0, len(before), chunk):
            part = before[start : start + chunk]
            padded = np.zeros(chunk, np.int32)
            padded[: len(part)] = part
            self._buffers = self._call(tokens=padded, mask=self._mask(np.tri(chunk, dtype=bool)))
            mx.eval(self._buffers)
            self._length += len(part)
        verified = self.step(root_only(int(tokens[-1])), choose)
        self.commit([0])
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def step(self, tree: DraftTree, choose: Choose | None = None) -> Verified:
        """As `StepModel.step`; greedy, the choice is part of the function."""
        if choose is not None:
            raise UserError("exported functions choose greedily: no sampling and no penalties")
        check_tree(self.limits, tree, self._length)
        size = 1 if tree.num_nodes == 1 else self._functions.num_nodes
        columns = np.zeros((3, size), np.int32)
        columns[0], columns[1] = tree.tokens[0], -1
        columns[:, : tree.num_nodes] = tree.tokens, tree.parents, tree.depths
        kept, chosen, accepted_row, logits, *self._buffers = self._call(
            tokens=columns[0],
            parents=columns[1],
            depths=columns[2],
            count=np.array([tree.num_nodes], np.int32),
            mask=self._mask(tree.ancestor_mask(size)),
        )
        mx.eval(kept, chosen, accepted_row, logits, self._buffers)
        kept, chosen = np.array(kept), np.array(chosen)
        accepted_node, real = int(kept[accepted_row.item()]), kept < tree.num_nodes
        self._kept = kept[real]
        return Verified(self._kept, chosen[real], accepted_node, np.array(logits))

    def commit(self, path: Sequence[int]) -> None:
        """As `StepModel.commit`."""
        if self._kept is None:
            raise RuntimeError("commit follows a step")
        lower, upper = np.zeros((2, self._functions.num_nodes), np.int32)
        lower[: len(path)] = path
        upper[: len(path)] = kept_rows(self._kept, path)
        self._buffers = self._call(lower=lower, upper=upper)
        mx.eval(self._buffers)
        self._length += len(path)
        self._kept = None

    def _call(self, **inputs: np.ndarray) -> list[mx.array]:
        keys, values = self._buffers
        arrays = {name: mx.array(array) for name, array in inputs.items()}
        with library_errors(f"{self._path}: the functions are not those that the manifest describes"):
            results = self._run(slot=mx.array([self._length]), keys=keys, values=values, **arrays)
            mx.eval(results)
        return results

    def _mask(self, rows: np.ndarray) -> np.ndarray:
        """bool [R, S]: the committed text, and `rows` [R, R] of what is being written."""
        mask = np.zeros((len(rows), self._functions.slots), bool)
        mask[:, : self._length] = True
        mask[:, self._length : self._length + len(rows)] = rows
        return mask


def open_functions(bundle: Bundle, adapter: BundledAdapter) -> FunctionModel:
    """The adapter's exported functions as a step model."""
    a, functions = bundle.manifest.architecture, adapter.mlxfn
    shape = a.num_layers, a.num_kv_heads, a.head_dim
    return FunctionModel(bundle.path / functions.file, functions, adapter.config, shape, a.vocab_size)
