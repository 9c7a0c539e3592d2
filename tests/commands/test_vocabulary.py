"""A tokenizer that knows more tokens than its base has rows, through the commands."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.config import SpeculativeConfig
from ss_device.trace import load_traces
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import rewrite_manifest
from tests.tiny_models import VOCAB, make_tiny_base, random_adapter


@pytest.fixture
def larger_tokenizer(tmp_path):
    """Models whose tokenizer has two tokens, `<extra>` and `<extra1>`, behind the embedding."""
    folder = make_tiny_base(tmp_path / "models/base/tiny-base", dtype="float16").path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    missing = VOCAB - tokenizer.get_vocab_size()
    fillers = [f"<filler{i}>" for i in range(missing)]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in (*fillers, "<extra>", "<extra1>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    base = open_base(folder)
    adapter = random_adapter(base, SpeculativeConfig(num_streams=2, num_msa_layers=1))
    save_adapter(adapter, base.architecture, tmp_path / "models/adapters/tiny")
    return tmp_path / "models"


def test_conversion_says_so_and_generation_refuses(larger_tokenizer, tmp_path, capfd, refuses):
    output = tmp_path / "out"
    command = ["--adapter", "tiny", "--models", larger_tokenizer, "--output", output, "--target", "mlx"]
    assert ss_convert([*map(str, command), "--json", "--no-golden"]) == 0
    [note, _] = json.loads(capfd.readouterr().out)["notes"]
    assert note == (
        "tokens of the tokenizer beyond the embedding of 300 rows: 2 (the first: '<extra>', id 300); "
        "prompts that need them are refused"
    )
    says = ("token id 300 ('<extra>') lies outside the model's vocabulary of 300 tokens",)
    refuses(ss_generate, "--bundle", output, "--prompt", "an <extra> token", says=says)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "fine"}\n{"prompt": "an <extra> token"}\n')
    refuses(ss_convert, *command, "--golden-prompts", prompts, says=(*says, "prompts.jsonl: prompt 2"))


def test_a_prompt_with_foreign_ids_in_golden_traces(copied, refuses):
    """What a damaged file holds must not be fed to the model."""
    file = copied / "golden" / "tiny.safetensors"
    content = file.read_bytes()
    prompt = load_traces(copied / "golden" / "tiny")[0].prompt
    there = np.array(prompt, np.int32).tobytes()
    foreign = np.array([prompt[0], 40_000_000, *prompt[2:]], np.int32).tobytes()
    assert content.count(there) == 1
    file.write_bytes(content.replace(there, foreign))
    rewrite_manifest(copied)
    refuses(ss_validate, copied, says=("golden prompt 0", "token id 40000000 lies outside"))
