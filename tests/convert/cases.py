"""What the tests of the graphs share: packages, step models, forced trees, comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from ss_convert.coreai_options import coreai_options
from ss_convert.coreml.convert import GraphOptions, write_package
from ss_convert.graph.description import describe
from ss_convert.graph.functions import adapter_functions
from ss_convert.graph.parts import part_names, parts_of
from ss_convert.graph.weights import ExportWeights
from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.bundle import StepFunctions
from ss_device.config import SpeculativeConfig
from ss_device.families import canonical_parts
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import StreamModel, attach_adapter, load_base
from ss_device.step_model import StepModel
from ss_device.tree import DraftTree, root_only, tree_from_parents
from ss_executor import load_package
from ss_runtime.coreai.host_cache import Kept
from ss_runtime.function_step_model import FunctionStepModel, chained
from tests.tiny_models import random_adapter

CONTEXT, CHUNK = 48, 8
# float32 on both sides; what is left is the order of additions.
TOLERANCE = {"rtol": 1e-4, "atol": 3e-4}


@dataclass(frozen=True)
class Pair:
    """A package on the executor, or an asset on Apple's runtime, in float32, and the reference.

    Both have the same weights. package: where it was written.
    """

    package: Path
    adapter: Adapter
    model: FunctionStepModel
    reference: ReferenceStepModel


def make_pair(
    base: BaseFolder,
    config: SpeculativeConfig,
    options: GraphOptions,
    folder: Path,
    target: str = "coreml",
) -> Pair:
    """Convert a random adapter with `config` and open it on both sides. target: a key of MAKE."""
    adapter = random_adapter(base, config)
    path = folder / target / "tiny"
    model = MAKE[target](base, adapter, options, path)
    reference = ReferenceStepModel(
        reference_model(base, adapter),
        options.num_nodes,
        options.num_kept,
        options.context,
        options.prune_over,
    )
    return Pair(path, adapter, model, reference)


def make_coreml(
    base: BaseFolder, adapter: Adapter, options: GraphOptions, path: Path, dtype: str = "float32"
) -> FunctionStepModel:
    """Write a package and open it on the executor."""
    path = path.with_suffix(".mlpackage")
    functions = write_package(base.architecture, base.weights(), adapter, options, path)
    return open_package(path, functions, adapter.config, base.architecture, dtype)


def open_package(path, functions, config, architecture, dtype="float32") -> FunctionStepModel:
    packages = [load_package(path.parent / Path(name).name) for name in functions.packages]
    engines = chained(functions, lambda part, name: packages[part].program(name, dtype))
    return FunctionStepModel(*engines, functions, config, architecture)


def write_coreai(base: BaseFolder, adapter: Adapter, options: GraphOptions, path: Path) -> StepFunctions:
    """Write an asset, or one per part → where the functions are."""
    from ss_convert.coreai.asset import write_asset

    options = coreai_options(options, None if options.cache == "state" else options.cache)
    architecture, parts = base.architecture, parts_of(base.architecture, options.cuts)
    names = part_names(path.stem, len(parts), ".aimodel")
    path.parent.mkdir(parents=True, exist_ok=True)
    for part, name in zip(parts, names, strict=True):
        functions = adapter_functions(architecture, base.weights(), adapter, options, part)
        write_asset(functions, path.parent / name, {}, half_only=options.preset == "ane")
    return describe(adapter, architecture, options, [f"{path.parent.name}/{name}" for name in names])


def make_coreai(
    base: BaseFolder, adapter: Adapter, options: GraphOptions, path: Path, dtype: str = "float32"
) -> FunctionStepModel:
    """Write an asset, or one per part, and open it on Apple's local runtime."""
    functions = write_coreai(base, adapter, options, path)
    return open_assets(path.parent.parent, functions, adapter.config, base.architecture, dtype)


def open_assets(bundle: Path, functions, config, architecture, dtype="float32") -> FunctionStepModel:
    """A step model over assets; bundle: the folder that paths of assets are in."""
    from ss_runtime.coreai.engines import asset_engines

    engines = asset_engines(bundle, functions, config, architecture, dtype)
    return FunctionStepModel(*engines, functions, config, architecture)


MAKE = {"coreml": make_coreml, "coreai": make_coreai}
NEEDS_COREAI = pytest.mark.skipif(find_spec("coreai") is None, reason="coreai-core is not installed")
EACH_TARGET = [pytest.param(name, marks=[NEEDS_COREAI] if name == "coreai" else []) for name in MAKE]


def reference_model(base: BaseFolder, adapter: Adapter) -> StreamModel:
    """The reference on the weights as exported, rounded to fp16, computed in float32."""
    exported = ExportWeights(base.architecture, base.weights(), adapter)
    model = load_base(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [exported.base(p.name) for p in canonical_parts(base.architecture, name)]
            parameter.copy_(torch.from_numpy(np.concatenate(parts).astype(np.float32)))
    return attach_adapter(model, base.architecture, adapter)


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, length).tolist()


def plain_text(model: StepModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a step model fed one node at a time."""
    tokens = [model.prefill(prompt).root]
    while len(tokens) < count:
        tokens.append(int(model.step(root_only(tokens[-1])).chosen[0]))
        model.commit([0])
    return tokens


def forced_tree(rng: np.random.Generator, truth: list[int], num_nodes: int, shape: str) -> DraftTree:
    """A tree under truth[0] that holds some of what follows in `truth`.

    shape `chain`: right tokens, wrong from a random depth on; `binary`: two children per node, one of
    them right; `random`: random parents; a repeated sibling token may occur.
    """
    tokens, parents, depths, right = [truth[0]], [-1], [0], [True]
    turn = rng.integers(1, num_nodes + 1)
    for node in range(1, num_nodes):
        parent = {"chain": node - 1, "binary": (node - 1) // 2, "random": int(rng.integers(0, node))}[shape]
        depth = depths[parent] + 1
        want = depth < turn if shape == "chain" else rng.random() < (0.5 if shape == "binary" else 0.7)
        siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        is_right = bool(right[parent] and want and depth < len(truth) and truth[depth] not in siblings)
        token = truth[depth] if is_right else int(rng.integers(3, 259))
        while token in siblings:
            token = int(rng.integers(3, 259))
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        right.append(is_right)
    return tree_from_parents(tokens, parents)


def compare_steps(
    pair: Pair, prompt: list[int], sizes: list[int], seed: int = 0, tolerance: float | None = None
) -> list[int]:
    """Drive both sides through the same forced trees; → number of accepted drafts per step.

    Raises AssertionError where kept nodes, chosen tokens, accepted node, stream logits or the cache differ.
    tolerance: absolute and relative, in place of TOLERANCE.
    """
    within = TOLERANCE if tolerance is None else {"rtol": tolerance, "atol": tolerance}
    truth = plain_text(pair.reference, prompt, CONTEXT - len(prompt))
    rng, depths, at = np.random.default_rng(seed), [], 0
    ours, theirs = pair.model.prefill(prompt), pair.reference.prefill(prompt)
    assert ours.root == theirs.root == truth[0]
    np.testing.assert_allclose(ours.stream_logits, theirs.stream_logits, **within)
    for turn, size in enumerate(sizes):
        shape = ("chain", "binary", "random")[turn % 3]
        tree = forced_tree(rng, truth[at:], min(size, len(truth) - at), shape)
        mine, other = pair.model.step(tree), pair.reference.step(tree)
        np.testing.assert_array_equal(mine.kept, other.kept)
        np.testing.assert_array_equal(mine.chosen, other.chosen)
        assert mine.accepted_node == other.accepted_node
        np.testing.assert_allclose(mine.stream_logits, other.stream_logits, **within)
        path = tree.path(mine.accepted_node)
        pair.model.commit(path)
        pair.reference.commit(path)
        depths.append(len(path) - 1)
        at += len(path)
    compare_caches(pair)
    return depths


def compare_caches(pair: Pair) -> None:
    """The committed slots hold the reference's keys and values (docs/method.md, Invariants, 4)."""
    cached = committed_cache(pair.model)
    layers = len(cached) // 2
    assert pair.model.length == pair.reference.length
    for layer, (keys, values) in enumerate(pair.reference.cache):
        np.testing.assert_allclose(cached[layer], keys[0].numpy(), **TOLERANCE)
        np.testing.assert_allclose(cached[layers + layer], values[0].numpy(), **TOLERANCE)


def committed_cache(model: FunctionStepModel) -> np.ndarray:
    """[2·L, n_kv, n, head_dim] after carrying out the pending commit with one more (dropped) step."""
    model.step(root_only(5))
    states = model.state if isinstance(model.state, list) else [model.state]
    halves = [np.split(_slots(state)[:, :, : model.length], 2) for state in states]
    return np.concatenate([half for kind in zip(*halves, strict=True) for half in kind])


def _slots(state) -> np.ndarray:
    """Keys and values as the engine's state holds them."""
    if isinstance(state, Kept):
        return state.cache
    held = state["kv_cache"]
    return np.array(held if isinstance(held, np.ndarray) else held.numpy())
