"""`main`, the base alone as Apple's engines drive it, against Hugging Face's own `generate`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("coreai", reason="coreai-core is not installed")

from ss_convert.coreai.asset import write_asset
from ss_convert.coreai.plain_function import plain_function
from ss_convert.coreai_options import coreai_options
from ss_convert.graph.functions import adapter_functions, base_weights
from ss_convert.graph.options import GraphOptions
from ss_device.base_model import BaseFolder
from ss_device.reference.stream_model import load_base
from tests.convert.coreai.apple_engine import AppleEngine
from tests.families.checks import LOSSLESS
from tests.families.tiny import CASES, CONTEXT, make_base
from tests.tiny_models import make_tiny_base, random_adapter

LAYOUTS = ("linear", "conv")
PROMPT, COUNT = np.random.default_rng(0).integers(3, 259, 11).tolist(), 20
# Of the largest logit: order of additions; fp16, whose texts may part where two logits are that close.
TOLERANCE = {"float32": 5e-4, "float16": 1.5e-2}


def write_main(base: BaseFolder, path: Path, **choices) -> Path:
    """An asset with `main` alone."""
    options, weights, adapter = _inputs(base, **choices)
    main = plain_function(base.architecture, weights, adapter.config, options)
    write_asset([main], path, {})
    return path


def _inputs(base: BaseFolder, **choices):
    options = coreai_options(GraphOptions(8, 8, context=CONTEXT, chunk=8, **choices), None)
    weights = base_weights(base.architecture, base.weights(), options)
    return options, weights, random_adapter(base, LOSSLESS)


def hugging_face(base: BaseFolder) -> tuple[list[int], np.ndarray]:
    """Its greedy text behind the prompt, and the logits [COUNT, V] that it was chosen by."""
    model = load_base(base).float()
    with torch.no_grad():
        text = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=None,
        )
        logits = model(text).logits[0, len(PROMPT) - 1 : -1]
    return text[0, len(PROMPT) :].tolist(), logits.numpy()


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_every_family_says_what_hugging_face_says(tmp_path, name):
    base = make_base(name, tmp_path / "base")
    text, logits = hugging_face(base)
    assets = [write_main(base, tmp_path / f"{layout}.aimodel", layout=layout) for layout in LAYOUTS]
    for asset in assets:  # the caches grow twice
        assert AppleEngine(asset, CONTEXT, "float32", first=8).generate(PROMPT, COUNT) == text, asset
    for dtype, tolerance in TOLERANCE.items():
        engine = AppleEngine(assets[0], CONTEXT, dtype)
        found = [engine.run(PROMPT)[-1:], *(engine.run([token]) for token in text[:-1])]
        assert np.abs(np.concatenate(found) - logits).max() < tolerance * np.abs(logits).max(), dtype


def test_a_prompt_in_pieces_says_the_same(tmp_path):
    asset = write_main(make_tiny_base(tmp_path / "base", dtype="float16"), tmp_path / "main.aimodel")
    texts = [AppleEngine(asset, CONTEXT, "float32").generate(PROMPT, 6, chunk=n) for n in (None, 1, 4, 5)]
    assert texts[1:] == texts[:1] * 3
    whole, pieces = (AppleEngine(asset, CONTEXT, "float32") for _ in range(2))
    apart = np.concatenate([pieces.run(PROMPT[:4]), pieces.run(PROMPT[4:])])
    np.testing.assert_allclose(apart, whole.run(PROMPT), rtol=1e-5, atol=1e-5)


def test_the_base_is_stored_once(tmp_path):
    """Beside other functions `main` adds its operations to the file, and no weights."""
    base = make_tiny_base(tmp_path / "base", dtype="float16", hidden_size=256, intermediate_size=512)
    options, weights, adapter = _inputs(base)
    functions = adapter_functions(base.architecture, weights, adapter, options)
    main = plain_function(base.architecture, weights, adapter.config, options)
    sizes = []
    for index, held in enumerate(((main,), functions, (*functions, main))):
        write_asset(held, tmp_path / f"{index}.aimodel", {})
        sizes.append((tmp_path / f"{index}.aimodel" / "main.mlirb").stat().st_size)
    matrices = sum(2 * w.size for w in base.weights().values() if w.ndim == 2)
    alone, without, both = sizes
    assert alone > matrices and 0 < both - without < matrices / 20
