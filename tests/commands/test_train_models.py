"""python -m scripts.train_models on a tiny plan: every stage, nothing twice, a later and longer run."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path

import pytest

from scripts import train_models
from scripts.model_tables import BASE
from ss_device.adapter import load_adapter
from ss_device.base_model import open_base
from ss_device.training.command import main as ss_train_main
from ss_device.training.pretrain import trained_time

RECIPE = f"""
name = "{BASE}"
seed = 3
[tokenizer]
vocab_size = 320
sample_documents = 100
[model]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 256
[training]
steps = 20
tokens_per_batch = 512
max_length = 128
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.1
[[sources]]
kind = "application"
app = "sqlctx"
path = "sqlctx/train.jsonl.gz"
weight = 0.9
augmentation = "permute_columns"
[[sources]]
kind = "text"
path = "general/talk.jsonl"
weight = 0.1
[[checks]]
app = "sqlctx"
path = "sqlctx/valid.jsonl.gz"
prompts = 2
max_tokens = 6
"""
PLAN = f"""
base = "{BASE}"
recipe = "recipe.toml"
[[applications]]
name = "sqlctx"
texts = 20
max_tokens = 8
max_length = 128
longest_test_prompt = 100
[[adapters]]
suffix = ""
settings = "plus"
set = ["num_streams=2", "num_msa_layers=2", "stream_lora_rank=2", "stream_lora_alpha=4"]
bigram_bias = true
epochs = 1
learning_rate = 1e-3
[[adapters]]
suffix = "-paper"
settings = "paper"
set = ["num_msa_layers=2"]
epochs = 1
learning_rate = 1e-3
"""
TABLES = ("data", "metrics", "trees", "depths", "parameters", "checks", "curve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "data/sqlctx").mkdir(parents=True)
    (root / "data/general").mkdir()
    (root / "models").mkdir()
    splits = {"train": ("stone", "apple", "ship"), "valid": ("tree",), "test": ("lamp",)}
    for split, things in splits.items():
        rows = [
            {
                "question": f"How many {thing}s weigh {n}?",
                "context": f"CREATE TABLE {thing} (weight INTEGER)",
                "answer": f"SELECT COUNT(*) FROM {thing} WHERE weight = {n}",
                "source": "made",
            }
            for thing in things
            for n in range(12)
        ]
        with gzip.open(root / f"data/sqlctx/{split}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    (root / "data/general/talk.jsonl").write_text('{"text": "stones and ships and apples"}\n')
    (root / "recipe.toml").write_text(RECIPE)
    (root / "plan.toml").write_text(PLAN)
    markers = "".join(f"<!-- begin {name} -->\nold\n<!-- end {name} -->\n" for name in TABLES)
    (root / "models/README.md").write_text(f"before\n{markers}after\n")
    return root


@pytest.fixture
def commands(monkeypatch):
    """The ss-train commands that were run; they run in this process."""
    called: list[str] = []

    def run(*words):
        words = [str(word) for word in words]
        called.append(" ".join(words[:2]))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert ss_train_main(words) == 0
        return out.getvalue()

    monkeypatch.setattr(train_models, "ss_train", run)
    return called


def run(folder, *more):
    return train_models.main(
        ["--data", str(folder / "data"), "--plan", str(folder / "plan.toml"),
         "--work", str(folder / "work"), "--models", str(folder / "models"),
         "--prompts", "3", "--tokens-per-batch", "512", *more]
    )  # fmt: skip


@pytest.mark.heavy
def test_the_whole_demo_is_made_once_and_installed_whole(folder, commands, capsys):
    assert run(folder) == 0
    base = open_base(folder / "models/base" / BASE)
    for name in ("sqlctx", "sqlctx-paper"):
        adapter = load_adapter(folder / "models/adapters" / name)
        adapter.check_base(base)
        depths = (folder / "models/adapters" / name / "acceptance.csv").read_text().splitlines()
        assert depths[0] == "tree,depth,acceptance" and depths[1].startswith("best-first:32,1,")
    text = (folder / "models/README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| sqlctx | 36 | 0 | 0 | 0 | 36 |" in text
    assert "papers' settings, best-first 32" in text and "wrong or missing slots" in text
    assert (folder / "models/base_curve.png").stat().st_size > 1000
    checks = json.loads((folder / "models/measurements/checks.json").read_text())
    assert checks.keys() == {"sqlctx", "sqlctx-paper"}
    assert all(abs(c["decoded"] / c["predicted"] - 1) <= 0.02 for c in checks.values())
    assert all(c["same_text"] == c["documents"] > 1 for c in checks.values())
    made = list(commands)
    assert run(folder) == 0
    # Only what resumes by itself is called again: the texts, of which none is missing.
    assert commands[len(made) :] == ["distill sqlctx"]
    half_a_model_is_not_installed(folder, capsys)
    a_longer_run_makes_another_base(folder, commands)


def half_a_model_is_not_installed(folder, capsys):
    """A missing measurement is named, and what was installed stays as it is."""
    (missing,) = (folder / "work").glob("*/checks/sqlctx-paper.json")
    text, readme = missing.read_text(), (folder / "models/README.md").read_bytes()
    missing.unlink()
    capsys.readouterr()
    assert run(folder, "--stage", "install") == 2
    assert "checks/sqlctx-paper.json: missing" in capsys.readouterr().err
    assert (folder / "models/README.md").read_bytes() == readme
    missing.write_text(text)


def a_longer_run_makes_another_base(folder, commands):
    """And what depends on it; what is installed stays until all of that is there."""
    commands.clear()
    before = {p.name for p in (folder / "work").iterdir()}
    behind = trained_time(folder / "work/base" / BASE).minutes  # of a busy machine more than of a quiet one
    minutes = str(behind + 0.03)
    assert run(folder, "--minutes", minutes, "--stage", "base", "--stage", "texts") == 0
    assert commands[0].startswith("base ") and "distill sqlctx" in commands
    assert len({p.name for p in (folder / "work").iterdir()} - before) == 1
    installed = folder / "models/base" / BASE / "model.safetensors"
    assert installed.read_bytes() != (folder / "work/base" / BASE / "model.safetensors").read_bytes()
    assert run(folder, "--minutes", minutes, "--stage", "base") == 0
    assert len([c for c in commands if c.startswith("base ")]) == 1


def test_bad_plans_and_missing_data_are_named(folder, capsys, tmp_path):
    for text, words in (
        ("base = ", "not valid TOML"),
        (PLAN.replace("texts", "text"), "text"),
        (PLAN.replace('recipe = "recipe.toml"', ""), "recipe"),
    ):
        (tmp_path / "plan.toml").write_text(text)
        assert run(folder, "--plan", str(tmp_path / "plan.toml")) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and "plan.toml" in error[0] and words in error[0]
    assert run(folder, "--stage", "texts", "--app", "sql") == 2
    assert "--app sql: the plan has sqlctx" in capsys.readouterr().err
    assert run(folder, "--work", str(tmp_path / "work"), "--stage", "texts") == 2
    assert "run the stage 'base' first" in capsys.readouterr().err
    assert train_models.main(["--plan", str(folder / "plan.toml")]) == 2
    assert "--data" in capsys.readouterr().err
    assert run(folder, "--work", str(tmp_path / "work"), "--data", str(tmp_path)) == 2
    assert ".jsonl.gz: no such file" in capsys.readouterr().err


def test_the_shipped_plan_is_read():
    plan = train_models.read_plan(
        Path(train_models.__file__).parents[1] / "models/recipes/ss_demo_models.toml"
    )
    assert plan.recipe.is_file() and {a.name for a in plan.applications} >= {"sqlctx", "e2e_nlg"}
    assert [a.bigram_bias for a in plan.adapters if a.settings == "plus"] == [True]
    assert not any(a.bigram_bias for a in plan.adapters if a.settings == "paper")
