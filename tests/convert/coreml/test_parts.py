"""A decoder cut into parts: every cut gives what one package gives, and what the reference gives."""

from __future__ import annotations

import numpy as np
import pytest

from ss_convert.coreml.convert import GraphOptions
from ss_convert.graph import parts
from ss_convert.graph.compression import compress
from ss_convert.graph.options import PRESETS
from ss_convert.graph.weight_format import WEIGHT_FORMATS, stored_bytes
from ss_device.config import SpeculativeConfig, paper_config
from ss_device.errors import UserError
from ss_executor import load_package
from tests.convert.cases import (
    CHUNK,
    CONTEXT,
    compare_steps,
    make_coreml,
    make_pair,
    plain_text,
    prompt_ids,
)
from tests.families import tiny as families
from tests.tiny_models import make_tiny_base, random_adapter

LAYERS = 4
PLUS = SpeculativeConfig(
    num_msa_layers=2, num_streams=2, stream_mlp="base", stream_lora_rank=2, stream_lora_alpha=3.0
)
SHARED = paper_config(
    "shared", num_msa_layers=3, num_streams=2, main_attends_streams=True, lora_rank=2, lora_alpha=3.0
)
# The first MSA layer lies inside a part, at a part's start, in the first part.
CASES = {
    "lossless, two": (PLUS, 6, (1,), {}),
    "pruned, every layer a part, ane": (PLUS, 4, (1, 2, 3), PRESETS["ane"]),
    "pruned over the vocabulary, gpu": (PLUS, 4, (3,), {**PRESETS["gpu"], "prune_over": "vocabulary"}),
    "shared, gated and pruned, three": (SHARED, 4, (2, 3), {}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "tiny"
    return make_tiny_base(folder, dtype="float16", num_hidden_layers=LAYERS, head_dim=32, hidden_size=24)


@pytest.mark.parametrize("case", CASES)
def test_parts_equal_the_reference_and_one_package(base, tmp_path, case):
    config, kept, cuts, graph = CASES[case]
    options = GraphOptions(6, kept, CONTEXT, CHUNK, cuts=cuts, **graph)
    pair = make_pair(base, config, options, tmp_path)
    depths = compare_steps(pair, prompt_ids(11), [6] * 6)
    assert max(depths) >= 1
    functions = pair.model.functions
    assert len(functions.packages) == len(functions.chain) == len(cuts) + 1
    for index, name in enumerate(functions.packages):
        _check_package(load_package(tmp_path / name), functions.chain[index], functions)


def _check_package(package, link, functions) -> None:
    """The state is a slice, every declared input is used, and the manifest names the inputs."""
    first, stop = link.layers
    for name, feeds in ((functions.prefill, link.prefill), (functions.step, link.step)):
        function = package.functions[name]
        assert function.states["kv_cache"].shape[0] == 2 * (stop - first)
        assert set(function.inputs) == set(feeds)
        used = {name for operation in function.block.walk() for name in operation.names()}
        assert set(function.inputs) <= used
    assert package.metadata["layers"] == f"{first}-{stop - 1}"


def test_half_precision_gives_the_same_numbers_in_parts(base, tmp_path):
    """What passes from part to part is fp16 in any case, so nothing is rounded twice."""
    adapter, prompt = random_adapter(base, PLUS), prompt_ids(11)
    models = [
        make_coreml(base, adapter, GraphOptions(6, 4, CONTEXT, CHUNK, cuts=cuts), path, "float16")
        for cuts, path in (((), tmp_path / "one/a.mlpackage"), ((1, 3), tmp_path / "three/a.mlpackage"))
    ]
    one, three = (model.prefill(prompt) for model in models)
    np.testing.assert_array_equal(one.stream_logits, three.stream_logits)
    assert plain_text(models[0], prompt, 12) == plain_text(models[1], prompt, 12)


@pytest.mark.parametrize(("family", "msa"), [("opt", 1), ("gemma2", 2)])
def test_families_whose_parts_need_other_inputs(tmp_path, family, msa):
    """OPT's learned positions matter where streams start; Gemma's parts differ in their windows."""
    other = families.make_base(family, tmp_path / "base")
    config = SpeculativeConfig(num_msa_layers=msa, num_streams=2)
    options = GraphOptions(5, 3, CONTEXT, CHUNK, cuts=(1, 2))
    pair = make_pair(other, config, options, tmp_path)
    assert max(compare_steps(pair, prompt_ids(9), [5] * 3)) >= 1
    first, *others = (link.step for link in pair.model.functions.chain)
    assert "positions" in first
    assert ["positions" in feeds for feeds in others] == [family == "gemma2", True]


@pytest.mark.parametrize("cuts", [(0,), (LAYERS,), (2, 2), (3, 1)])
def test_cuts_outside_the_layers_are_refused(base, tmp_path, cuts):
    options = GraphOptions(6, 6, CONTEXT, CHUNK, cuts=cuts)
    with pytest.raises(UserError, match="must ascend between layers 1 and 3"):
        make_coreml(base, random_adapter(base, PLUS), options, tmp_path / "coreml/a.mlpackage")


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(64, 96), (24, 40), (14, 22)])
def test_stored_bytes_are_what_compression_leaves(weight_format, shape):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    stored = compress(weight, weight_format)
    if weight_format == "fp16":
        size = stored.nbytes
    elif weight_format.startswith("int"):
        size = stored.data.size * stored.bits // 8 + stored.scale.nbytes
    else:
        size = -(-stored.indices.size * stored.bits // 8) + stored.table.nbytes
    assert stored_bytes(shape, weight_format) == size


def test_cuts_make_files_even_and_keep_them_small(base, monkeypatch):
    adapter = random_adapter(base, PLUS)
    options = GraphOptions(6, 4, CONTEXT, CHUNK)

    def chosen(count):
        return parts.choose_cuts(base.architecture, [adapter], options, count)

    assert chosen("auto") == () and chosen(1) == ()
    # Embedding (first), head (last, and where the first MSA layer prunes) outweigh this base's layers.
    assert chosen(2) == (2,) and chosen(LAYERS) == (1, 2, 3)
    # Half of all weights and both tables: one file is too large, two are not.
    table, layers = 2 * 300 * 24, 2 * LAYERS * (24 * 32 * 12 + 3 * 24 * 48)
    monkeypatch.setattr(parts, "LARGEST_FILE", table + layers - 1)
    assert chosen("auto") == chosen(2)
    with pytest.raises(UserError, match="--parts 5 exceeds the 4 layers"):
        chosen(5)
    monkeypatch.setattr(parts, "LARGEST_FILE", 1000)
    with pytest.raises(UserError, match="even one layer per part leaves a file of"):
        chosen("auto")
