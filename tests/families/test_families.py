"""Every family on every back end against Hugging Face; a wrong detail of an architecture is noticed."""

from __future__ import annotations

from functools import cache

import pytest

from tests.convert.cases import NEEDS_COREAI
from tests.families.back_ends import make_subject, measure_back_end, mlx_back_end
from tests.families.checks import measure
from tests.families.tiny import CASES

# `make families` measures everything in both modes; here what takes seconds is done once for each detail.
SHARED = ("llama3", "qwen2", "phi3", "opt", "gemma2")
SUBJECTS = [(name, "lossless") for name in CASES] + [(name, "shared") for name in SHARED]
PACKAGES = {
    "llama3": "shared",
    "mistral": "lossless",
    "qwen3": "shared",
    "phi": "lossless",
    "phi3": "lossless",
    "opt": "shared",
    "gemma2": "lossless",
    "gemma3_text": "shared",
}
MUTATIONS = [(name, what) for name, case in CASES.items() for what in case.mutations]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return cache(lambda name, mode: make_subject(name, mode, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize(("name", "mode"), SUBJECTS)
@pytest.mark.parametrize("back_end", ["reference", "mlx"])
def test_logits_and_text_are_hugging_faces(subject, name, mode, back_end, tmp_path):
    found = measure_back_end(back_end, subject(name, mode), tmp_path)
    assert not found.failures(), found


@pytest.mark.parametrize(("name", "mode"), PACKAGES.items())
def test_written_package_gives_hugging_faces_logits_and_text(subject, name, mode, tmp_path):
    found = measure_back_end("executor", subject(name, mode), tmp_path)
    assert not found.failures(), found


@NEEDS_COREAI
@pytest.mark.parametrize(("name", "mode"), SUBJECTS)
def test_written_asset_gives_hugging_faces_logits_and_text(subject, name, mode, tmp_path):
    found = measure_back_end("coreai", subject(name, mode), tmp_path)
    assert not found.failures(), found


@NEEDS_COREAI
@pytest.mark.parametrize(("preset", "mode"), [("gpu", "lossless"), ("ane", "shared")])
@pytest.mark.parametrize("name", CASES)
def test_presets_of_assets_give_hugging_faces_logits_and_text(subject, name, preset, mode, tmp_path):
    found = measure_back_end(f"coreai {preset}", subject(name, mode), tmp_path)
    assert not found.failures(), found


@pytest.mark.parametrize("name", ["mistral", "opt", "gemma3_text"])
def test_streams_of_the_accepted_node_alone_are_the_same(subject, name):
    """MLX's second pass over the accepted node's streams: windows and learned positions included."""
    lossless = subject(name, "lossless")
    found = measure(mlx_back_end(lossless, "accepted"), lossless.truth, lossless.reference())
    assert not found.failures(), found


@pytest.mark.parametrize(("name", "what"), MUTATIONS)
def test_a_wrong_detail_is_noticed(subject, name, what):
    right = subject(name, "lossless")
    wrong = mlx_back_end(right.changed(**CASES[name].mutations[what]))
    assert measure(wrong, right.truth, until_failure=True).failures()
