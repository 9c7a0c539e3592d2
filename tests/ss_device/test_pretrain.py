"""Base pre-training from a recipe: tokenizer, stretches, copying initialisation, resume, the folder."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ss_device.base_model import open_base
from ss_device.errors import UserError
from ss_device.training import base_run as module
from ss_device.training.base_run import NextTokenLoss
from ss_device.training.batching import collate, plan_batches
from ss_device.training.budget import Budget, StepClock, learning_rate
from ss_device.training.copy_initialization import wire_copying
from ss_device.training.corpus import Document, repeated_spans
from ss_device.training.document_stream import DocumentStream
from ss_device.training.explicit_attention import explicit_attention
from ss_device.training.pretrain import pretrain, trained_time
from ss_device.training.recipe import load_recipe
from ss_device.training.settings import PretrainSettings, RunOptions

RESUME, OFTEN = RunOptions(resume=True), PretrainSettings(checkpoint_minutes=0.0)
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
until_tokens = 1500
[[checks]]
app = "sqlctx"
path = "rows.jsonl"
prompts = 3
max_tokens = 6
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


# Of another model's continuations, which hold no answers to compare with.
CONTINUATIONS = RECIPE[: RECIPE.index("[[checks]]")].replace(
    'kind = "application"\napp = "sqlctx"', 'kind = "continuations"'
)


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
        pretrain(recipe, tmp_path, tmp_path / "cut", settings=OFTEN)
    assert not (tmp_path / "cut").exists()
    monkeypatch.setattr(module, "train_step", original)
    with pytest.raises(UserError, match="is one of 12 steps, not of 5 minutes held; give the same again"):
        pretrain(recipe, tmp_path, tmp_path / "cut", Budget(minutes=5, hold=True), run=RESUME)
    pretrain(recipe, tmp_path, tmp_path / "cut", settings=OFTEN, run=RESUME)
    other = weights(tmp_path / "cut")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, other[name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut.run/log.jsonl").open()]
    assert steps == sorted(set(steps))


def test_a_further_stretch_goes_on_from_the_state_before_the_decay(recipe, tmp_path):
    """10 steps (decay from the 7th on), then 8 more from step 6: the same as 6 held steps and 8 more."""
    run = tmp_path / "two.run"
    pretrain(recipe, tmp_path, tmp_path / "two", Budget(steps=10))
    assert json.loads((run / "held/record.json").read_text())["step"] == 6
    assert trained_time(tmp_path / "two").ended
    annealed = weights(tmp_path / "two")
    pretrain(recipe, tmp_path, tmp_path / "two", Budget(steps=8), run=RESUME)
    pretrain(recipe, tmp_path, tmp_path / "held", Budget(steps=6, hold=True))
    assert not (tmp_path / "held").exists()
    pretrain(recipe, tmp_path, tmp_path / "held", Budget(steps=8), run=RESUME)
    other = weights(tmp_path / "held")
    for name, tensor in weights(tmp_path / "two").items():
        assert torch.equal(tensor, other[name]), name
    assert any(not torch.equal(tensor, annealed[name]) for name, tensor in other.items())
    assert json.loads((run / "checkpoint/record.json").read_text())["step"] == 14


def test_the_log_has_what_held_out_rows_say(recipe, tmp_path):
    log: list[dict] = []
    pretrain(recipe, tmp_path, tmp_path / "out", report=log.append)
    valid = log[-1]["valid"]["sqlctx"]
    assert {"loss", "exact_match", "any_case_match", "skeleton_match", "looping"} <= set(valid)
    assert 0 < valid["loss"] < 6 and 0 <= valid["looping"] <= 1
    assert "valid" not in log[0] and log[-1]["epochs"]["rows.jsonl"] > 0
    again: list[dict] = []
    pretrain(
        recipe,
        tmp_path,
        tmp_path / "more",
        settings=PretrainSettings(check_minutes=1e-9),
        report=again.append,
    )
    assert len(again) == recipe.schedule.steps and all("valid" in line for line in again)


def test_an_existing_run_is_not_overwritten(recipe, tmp_path):
    (tmp_path / "out.run/tokenizer").mkdir(parents=True)  # killed before its first checkpoint
    pretrain(recipe, tmp_path, tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--resume"):
        pretrain(recipe, tmp_path, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("of the user")
    with pytest.raises(UserError, match="mine: exists and is not a base model of this command"):
        pretrain(recipe, tmp_path, tmp_path / "mine")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before


def test_weights_in_shards_are_the_same(recipe, tmp_path):
    pretrain(recipe, tmp_path, tmp_path / "one")
    pretrain(recipe, tmp_path, tmp_path / "many", settings=PretrainSettings(shard_size="20KB"))
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    other = weights(tmp_path / "many")
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(tmp_path / "one").items())
    open_base(tmp_path / "many").weights()


def test_learning_rate_warms_up_holds_and_decays(recipe):
    schedule = replace(recipe.schedule, warmup_steps=10, learning_rate=1.0, decay_share=0.4)
    budget, held = Budget(steps=100), Budget(steps=100, hold=True)
    rates = [learning_rate(step, budget.done(step, 0.0), budget, schedule) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[59] == 1.0
    assert rates[80] == pytest.approx(0.5) and rates[99] == pytest.approx(0.025)
    assert learning_rate(99, held.done(99, 0.0), held, schedule) == 1.0
    timed = Budget(minutes=2.0)
    assert timed.done(7, 60.0) == 0.5 and timed.done(7, 500.0) == 1.0
    # A later stretch does not warm up again.
    assert learning_rate(1000, 0.0, timed, schedule) == 1.0


def test_a_pause_uses_no_budget(monkeypatch):
    now = iter([0.0, *(second for n in range(25) for second in (n + 1.0, n + 1.0)), 500.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    clock = StepClock()
    for _ in range(25):
        assert clock.step() == pytest.approx(1.0)
        clock.start()
    assert clock.step() == pytest.approx(StepClock.LONGEST)


def test_explicit_attention_computes_what_torch_does():
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mixed, _ = explicit_attention(None, query, key, value, scaling=0.3)
    wanted = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(mixed, wanted.transpose(1, 2))


def test_only_targets_count(recipe, tmp_path):
    """The loss at chosen targets equals Hugging Face's own logits there; the rest is not looked at."""
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    ids = torch.randint(3, 320, (2, 12))
    targets = torch.zeros(2, 12, dtype=torch.bool)
    targets[0, 5] = targets[1, 11] = True
    logits = model(input_ids=ids).logits.log_softmax(-1)
    wanted = -(logits[0, 4, ids[0, 5]] + logits[1, 10, ids[1, 11]]) / 2
    torch.testing.assert_close(NextTokenLoss(model)(ids, targets), wanted)


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
    for wrong, word in (("max_length = 96", "max_length"), ('name = "tiny"', "name")):
        (tmp_path / "bad.toml").write_text(RECIPE.replace(wrong, ""))
        with pytest.raises(UserError, match=word):
            load_recipe(tmp_path / "bad.toml")
    for wrong, word in (("tokens_per_batch = 256", "tokens_per_batch"), ("max_length = 96", "max_length")):
        (tmp_path / "bad.toml").write_text(RECIPE.replace(wrong, f"{word} = {1 << 40}"))
        with pytest.raises(UserError, match=f"{word} {1 << 40} must lie between 1 and"):
            load_recipe(tmp_path / "bad.toml")
    for right, wrong, words in (
        ("seed = 3", "seed = -3", "seed -3 must not be negative"),
        ("vocab_size = 320", "vocab_size = -3", "vocab_size -3 must lie"),
        ("sample_documents = 100", "sample_documents = 0", "sample_documents 0 must"),
        ("weight = 0.9", "weight = 0.0", "none of the sources has a weight"),
    ):
        (tmp_path / "bad.toml").write_text(RECIPE.replace(right, wrong))
        with pytest.raises(UserError, match=words):
            load_recipe(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text(RECIPE.replace("vocab_size = 320", "vocab_size = 258"))
    with pytest.raises(UserError, match="vocab_size 258 must be at least 259"):
        pretrain(load_recipe(tmp_path / "bad.toml"), tmp_path, tmp_path / "small")
    (tmp_path / "bad.toml").write_text(RECIPE.replace("rows.jsonl", "x" * 3000))
    with pytest.raises(UserError, match="x…' has 3000 characters"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text(RECIPE.replace("weight_decay", "wait_decay"))
    with pytest.raises(UserError, match="wait_decay"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "rows.jsonl").write_text('{"question": "x", "context": "y"}\n')
    with pytest.raises(UserError, match="answer"):
        pretrain(recipe, tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(tmp_path / "none.toml")


def test_a_missing_file_is_named_before_a_run_is_replaced(recipe, tmp_path):
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=1))
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"recipe 'tiny': .*rows\.jsonl: no such file"):
        pretrain(recipe, tmp_path, tmp_path / "base", run=RunOptions(force=True))
    assert (tmp_path / "base.run/checkpoint/record.json").is_file()


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("first_step", 3, "not come to"),
        ("first_step", 1e308, "Expected 'int', got 'float' - at 'stretch.first_step'"),
        ("before", 1e9, "not come to"),
        ("first_step", -1, "must not begin before the run"),
        ("before", -1.0, "must not begin before the run"),
        ("steps", 10**12, "at most"),
        ("minutes", 1e300, "at most"),
        ("minutes", -1, "at most"),
        ("steps", 0, "so many steps or minutes"),
        ("hold", 0.5, "Expected 'bool', got 'float' - at 'stretch.hold'"),
    ],
)
def test_a_stretch_that_cannot_be_is_named(recipe, tmp_path, entry, value, words):
    """Gone on with, it would never end."""
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=2))
    file = tmp_path / "base.run/checkpoint/record.json"
    record = json.loads(file.read_text())
    record["stretch"][entry] = value
    file.write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"record.json.*{words}"):
        pretrain(recipe, tmp_path, tmp_path / "base", run=RESUME)


def test_a_draft_model_reads_continuations_with_another_models_tokenizer(recipe, tmp_path):
    pretrain(recipe, tmp_path, tmp_path / "base")
    rows = [{"prompt": f"{n} stones", "completion_ids": [5, 6, 7, 2]} for n in range(20)]
    written = tmp_path / "own.jsonl"
    written.write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "draft.toml").write_text(CONTINUATIONS.replace("rows.jsonl", "own.jsonl"))
    draft = load_recipe(tmp_path / "draft.toml")
    with pytest.raises(UserError, match="--tokenizer"):
        pretrain(draft, tmp_path, tmp_path / "draft")
    pretrain(draft, tmp_path, tmp_path / "draft", settings=PretrainSettings(tokenizer_of=tmp_path / "base"))
    made, given = (tmp_path / name / "tokenizer.json" for name in ("draft", "base"))
    assert made.read_bytes() == given.read_bytes()
    tokenizer = Tokenizer.from_file(str(tmp_path / "base/tokenizer.json"))
    documents = DocumentStream(draft, tmp_path, tokenizer).next_batch()
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
    (tmp_path / "draft.toml").write_text(CONTINUATIONS.replace("rows.jsonl", "own.jsonl"))
    with pytest.raises(UserError, match=rf"own\.jsonl.*1.*{words}"):
        draft = load_recipe(tmp_path / "draft.toml")
        pretrain(
            draft, tmp_path, tmp_path / "draft", settings=PretrainSettings(tokenizer_of=tmp_path / "base")
        )
    (tmp_path / "draft.toml").write_text(CONTINUATIONS.replace("continuations", "chapters"))
    with pytest.raises(UserError, match="'chapters'"):
        load_recipe(tmp_path / "draft.toml")
    (tmp_path / "draft.toml").write_text(RECIPE.replace("vocab_size = 320", "vocab_size = 300"))
    with pytest.raises(UserError, match="320 tokens, the recipe says 300"):
        small = load_recipe(tmp_path / "draft.toml")
        pretrain(
            small, tmp_path, tmp_path / "draft", settings=PretrainSettings(tokenizer_of=tmp_path / "base")
        )


def test_training_leaves_denormals_as_they_were(recipe, tmp_path):
    pretrain(recipe, tmp_path, tmp_path / "base", Budget(steps=1))
    smallest = np.array([1e-40], np.float32)
    assert (smallest * np.float32(0.5))[0] != 0 and (torch.from_numpy(smallest) * 0.5).item() != 0
