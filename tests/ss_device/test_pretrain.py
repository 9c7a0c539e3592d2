"""Base pre-training from a recipe: tokenizer, plan, copying initialisation, resume, the folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ss_device.base_model import open_base
from ss_device.errors import UserError
from ss_device.training import pretrain as module
from ss_device.training.batching import collate, plan_batches
from ss_device.training.copy_initialization import wire_copying
from ss_device.training.corpus import Document, repeated_spans
from ss_device.training.pretrain import learning_rate, pretrain
from ss_device.training.recipe import load_recipe

RECIPE = """
name = "tiny"
seed = 3
[tokenizer]
vocab_size = 320
sample_documents = 100
[model]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 128
[training]
steps = 12
tokens_per_batch = 256
max_length = 96
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.1
prompt_weight = 0.5
[[sources]]
kind = "application"
app = "sqlctx"
path = "rows.jsonl"
weight = 0.9
[[sources]]
kind = "repeat"
weight = 0.1
until = 0.5
"""


@pytest.fixture
def recipe(tmp_path):
    rows = [
        {
            "question": f"How many {thing}s weigh {weight}?",
            "context": f"CREATE TABLE {thing} (weight INTEGER)",
            "answer": f"SELECT COUNT(*) FROM {thing} WHERE weight = {weight}",
        }
        for thing in ("stone", "apple", "ship", "tree")
        for weight in range(10)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return load_recipe(tmp_path / "recipe.toml")


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_a_killed_run_resumes_to_the_same_weights(recipe, tmp_path, monkeypatch):
    log: list[dict] = []
    pretrain(recipe, tmp_path, tmp_path / "whole", report=log.append)
    base = open_base(tmp_path / "whole")
    assert base.architecture.num_layers == 2 and base.architecture.eos_ids == (2,)
    assert base.weights()["embed.weight"].dtype == np.float16
    original, calls = module.train_step, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(module, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, tmp_path, tmp_path / "cut", checkpoint_minutes=0.0)
    assert not (tmp_path / "cut").exists()
    monkeypatch.setattr(module, "train_step", original)
    pretrain(recipe, tmp_path, tmp_path / "cut", resume=True, checkpoint_minutes=0.0)
    other = weights(tmp_path / "cut")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, other[name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut.run/log.jsonl").open()]
    assert steps == sorted(set(steps))


def test_learning_rate_warms_up_decays_and_cools_down(recipe):
    from dataclasses import replace

    schedule = replace(recipe.schedule, steps=100, warmup_steps=10, learning_rate=1.0)
    assert learning_rate(0, schedule) == pytest.approx(0.1)
    assert learning_rate(10, schedule) == pytest.approx(1.0)
    assert learning_rate(55, schedule) == pytest.approx(0.5)
    cooled = replace(schedule, cooldown_start=55, cooldown_steps=10)
    assert cooled.last_step == 65 and schedule.last_step == 100
    assert learning_rate(54, cooled) == learning_rate(54, schedule)
    assert learning_rate(60, cooled) == pytest.approx(0.5 * learning_rate(60, schedule))


def test_wired_weights_copy_before_any_training():
    """The hand-made circuit predicts the second copy of random tokens; ordinary weights do not."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=384, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    documents = repeated_spans(8, 1024, np.random.default_rng(0), 1, 2)
    ids, mask = (torch.from_numpy(a) for a in collate(documents, 0, 0.0))

    def share_right() -> float:
        with torch.no_grad():
            right = model(input_ids=ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
        return float((right * mask[:, 1:]).sum() / mask[:, 1:].sum())

    assert share_right() < 0.05
    wire_copying(model, 0)
    assert share_right() > 0.6


def test_batches_hold_every_document_once_within_the_budget():
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 60, 300).tolist()
    batches = plan_batches(lengths, 200, rng, pool=4)
    assert sorted(i for b in batches for i in b) == list(range(300))
    assert all(len(b) * max(lengths[i] for i in b) <= 200 for b in batches)
    ids, mask = collate(
        [Document(np.array([1, 5, 6, 2], np.int32), 2), Document(np.array([1, 7], np.int32), 0)], 0, 0.3
    )
    assert ids.tolist() == [[1, 5, 6, 2], [1, 7, 0, 0]]
    np.testing.assert_allclose(mask, [[0, 0.3, 1, 1], [0, 1, 0, 0]])


def test_bad_recipes_and_rows_are_named(recipe, tmp_path):
    for wrong, word in (("steps = 12", "steps"), ('name = "tiny"', "name")):
        (tmp_path / "bad.toml").write_text(RECIPE.replace(wrong, ""))
        with pytest.raises(UserError, match=word):
            load_recipe(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text(RECIPE.replace("weight_decay", "wait_decay"))
    with pytest.raises(UserError, match="wait_decay"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "rows.jsonl").write_text('{"question": "x", "context": "y"}\n')
    with pytest.raises(UserError, match="answer"):
        pretrain(recipe, tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(tmp_path / "none.toml")


def test_a_draft_model_reads_continuations_with_another_models_tokenizer(recipe, tmp_path):
    pretrain(recipe, tmp_path, tmp_path / "base")
    rows = [{"prompt": f"{n} stones", "completion_ids": [5, 6, 7, 2]} for n in range(20)]
    written = tmp_path / "own.jsonl"
    written.write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = RECIPE.replace('kind = "application"\napp = "sqlctx"', 'kind = "continuations"')
    (tmp_path / "draft.toml").write_text(text.replace("rows.jsonl", "own.jsonl"))
    draft = load_recipe(tmp_path / "draft.toml")
    with pytest.raises(UserError, match="--tokenizer"):
        pretrain(draft, tmp_path, tmp_path / "draft")
    pretrain(draft, tmp_path, tmp_path / "draft", tokenizer_of=tmp_path / "base")
    made, given = (tmp_path / name / "tokenizer.json" for name in ("draft", "base"))
    assert made.read_bytes() == given.read_bytes()
    documents, _ = module.load_plan(tmp_path / "draft.run/plan.safetensors")
    endings = {tuple(d.ids[d.prompt_length :]) for d in documents if d.prompt_length < 20}
    assert (5, 6, 7, 2) in endings


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x"}, "ss-train distill"),
        ({"prompt": "x", "completion_ids": [1, 320]}, "320 tokens"),
    ],
)
def test_bad_continuations_are_named(recipe, tmp_path, row, words):
    pretrain(recipe, tmp_path, tmp_path / "base")
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    text = RECIPE.replace('kind = "application"\napp = "sqlctx"', 'kind = "continuations"')
    (tmp_path / "draft.toml").write_text(text.replace("rows.jsonl", "own.jsonl"))
    with pytest.raises(UserError, match=rf"own\.jsonl.*1.*{words}"):
        draft = load_recipe(tmp_path / "draft.toml")
        pretrain(draft, tmp_path, tmp_path / "draft", tokenizer_of=tmp_path / "base")
    (tmp_path / "draft.toml").write_text(text.replace("continuations", "chapters"))
    with pytest.raises(UserError, match="'chapters'"):
        load_recipe(tmp_path / "draft.toml")
    (tmp_path / "draft.toml").write_text(RECIPE.replace("vocab_size = 320", "vocab_size = 300"))
    with pytest.raises(UserError, match="320 tokens, the recipe says 300"):
        small = load_recipe(tmp_path / "draft.toml")
        pretrain(small, tmp_path, tmp_path / "draft", tokenizer_of=tmp_path / "base")
