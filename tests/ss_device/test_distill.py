"""Self-distillation: the base's own texts, greedy and sampled, resumed and refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from ss_device.errors import UserError
from ss_device.evaluation.stopping import stop_length, text_before_stop
from ss_device.reference.stream_model import load_base
from ss_device.sampling import Sampling
from ss_device.training.continuations import continuations, row_seed
from ss_device.training.distill import Prompt, _finished, distill
from ss_device.training.settings import Continuation, DistillSettings
from tests.tiny_models import make_tiny_base

PROMPTS = [Prompt((1, *range(10, 14)), "one"), Prompt((1, 40), "two"), Prompt((1, 5, 6, 7, 8, 9, 10))]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base):
    return load_base(base)


@pytest.fixture(scope="module")
def tokenizer(base):
    return Tokenizer.from_file(str(base.path / "tokenizer.json"))


def one_by_one(model, prompt, choose, count: int) -> list[int]:
    """Reference generation: a whole forward pass per token, no cache, no batch."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
        ids.append(int(choose(logits, len(ids))))
        if ids[-1] == 2:
            break
    return ids[len(prompt) :]


def test_greedy_texts_are_those_of_one_prompt_at_a_time(model, tokenizer, tmp_path):
    out, lines = tmp_path / "own.jsonl", []
    settings = DistillSettings(max_tokens=9, batch_size=2)
    assert distill(model, tokenizer, PROMPTS, out, [2], settings, {}, lines.append) == 3
    rows = [json.loads(line) for line in out.open()]
    wanted = {p.text: one_by_one(model, p.ids, lambda x, _: x.argmax(), 9) for p in PROMPTS}
    assert {r.get("prompt"): r["completion_ids"] for r in rows} == wanted
    assert [r["prompt_ids"] for r in rows if "prompt_ids" in r] == [list(PROMPTS[2].ids)]
    assert [line["step"] for line in lines] == [2, 3] and lines[0]["prompts_per_second"] > 0


def test_sampled_texts_follow_keyed_noise_in_any_batch(model, tokenizer):
    settings = Continuation(max_tokens=8, temperature=0.8, top_p=0.9, seed=5)
    prompts = [p.ids for p in PROMPTS for _ in range(2)]
    made = continuations(model, tokenizer, prompts, [2], settings, [0, 1] * 3)
    for prompt, sample, text in zip(prompts, [0, 1] * 3, made, strict=True):
        rule = Sampling(0.8, top_p=0.9, seed=row_seed(5, sample, prompt))
        assert text == one_by_one(model, prompt, rule.choose, 8)
    assert made[0] != made[1]


def test_the_base_folders_own_generation_settings_change_nothing(model, tokenizer):
    plain = continuations(model, tokenizer, [(1, 9, 8)], [2], Continuation(max_tokens=8))
    model.generation_config.repetition_penalty = 5.0
    assert continuations(model, tokenizer, [(1, 9, 8)], [2], Continuation(max_tokens=8)) == plain


def test_stop_strings_end_a_text(model, tokenizer):
    whole = continuations(model, tokenizer, [(1, 40)], [2], Continuation(max_tokens=12))[0]
    text = tokenizer.decode(whole[4:5])
    settings = Continuation(max_tokens=12, stop_strings=(text,))
    cut = continuations(model, tokenizer, [(1, 40)], [2], settings)[0]
    assert cut == whole[: len(cut)] and len(cut) <= 5 and text in tokenizer.decode(cut)
    ids = tokenizer.encode("abc;def").ids
    assert stop_length(ids, tokenizer, [";", "zz"]) == 4 and stop_length(ids, tokenizer, ["zz"]) is None
    assert text_before_stop(ids, tokenizer, [";"]) == "abc"


def test_a_killed_run_goes_on_and_other_settings_are_refused(model, tokenizer, tmp_path):
    settings = DistillSettings(max_tokens=6, temperature=1.0, seed=2, samples=2, batch_size=2)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    made_from = {"base": {"sha256": "aa"}, "app": "x"}
    arguments = ([2], settings, made_from)
    distill(model, tokenizer, PROMPTS, whole, *arguments)
    distill(model, tokenizer, PROMPTS, cut, *arguments)
    text = cut.read_text()
    cut.write_text(text[: len(text) * 2 // 3])
    assert distill(model, tokenizer, PROMPTS, cut, *arguments) > 0
    assert sorted(cut.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert distill(model, tokenizer, PROMPTS, cut, *arguments) == 0
    before = cut.read_text()
    for changed, word in (
        ((replace(settings, temperature=0.5), made_from), "temperature 1.0, now 0.5"),
        ((settings, {**made_from, "base": {"sha256": "bb"}}), "written with base"),
    ):
        with pytest.raises(UserError, match=word):
            distill(model, tokenizer, PROMPTS, cut, [2], *changed)
    with pytest.raises(UserError, match="top-p 0"):
        Continuation(temperature=1.0, top_p=0.0)
    assert cut.read_text() == before


def test_only_ones_own_torn_line_is_cut(tmp_path):
    """The trace of a killed writer goes; a file that holds something else stays byte for byte."""
    file = tmp_path / "own.jsonl"
    row = json.dumps({"prompt": "a", "sample": 0, "completion_ids": [1]}) + "\n"
    file.write_text(row + row[:20])
    assert _finished(file) == {("a", 0)}
    assert file.read_text() == row
    for content in ("a letter, without a line end", row + "some text", row + "{\n"):
        file.write_text(content)
        with pytest.raises(UserError, match="own.jsonl:"):
            _finished(file)
        assert file.read_text() == content
