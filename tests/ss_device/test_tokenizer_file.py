"""A tokenizer's file: what is for other uses is left out, what cannot work is named."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from ss_device.errors import UserError
from ss_device.tokenizer_file import read_tokenizer
from tests.tiny_models import make_tiny_base

TEXT = "SELECT a, b FROM t WHERE c = 'Zürich' AND d > 10"
PADDING = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}
CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}


@pytest.fixture
def folder(tmp_path):
    return make_tiny_base(tmp_path / "base").path


def change(folder, **entries):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def ids(folder):
    return read_tokenizer(folder).encode(TEXT, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "entries",
    [
        {"truncation": CUT},
        {"truncation": CUT | {"strategy": "OnlySecond"}},
        {"truncation": CUT | {"max_length": 1, "stride": 1}},
        {"padding": PADDING | {"strategy": {"Fixed": 512}, "pad_to_multiple_of": None}},
        {"padding": PADDING | {"strategy": {"Fixed": 10**12}, "pad_to_multiple_of": None}},
        {"padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 10**12}},
    ],
)
def test_a_prompt_is_neither_cut_nor_padded(folder, entries):
    wanted = PreTrainedTokenizerFast.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids
    change(folder, **entries)
    assert ids(folder) == wanted and len(wanted) > 3


def test_merges_are_not_left_out_at_random(folder):
    wanted = ids(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, model=raw | {"dropout": 0.9})
    assert all(ids(folder) == wanted for _ in range(5))


@pytest.mark.parametrize(
    "entries",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}},
        {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 999}},
    ],
)
def test_a_tokenizer_that_cannot_encode_every_text_is_named(folder, entries, capfd):
    change(folder, **entries)
    with pytest.raises(UserError, match="tokenizer.json: cannot encode every text"):
        read_tokenizer(folder)
    assert capfd.readouterr() == ("", "")
