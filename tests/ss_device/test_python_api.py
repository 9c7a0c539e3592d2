"""Training from Python: the same adapter as `ss-train adapter`, and one line for each wrong input."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest

import ss_device
from ss_device import AdapterInputs, AdapterSchedule, SpeculativeConfig, load_adapter, train_adapter
from ss_device.application import load_application
from ss_device.errors import UserError
from ss_device.training.command import main
from tests.tiny_models import make_tiny_base

SETTINGS = {"num_streams": 2, "num_msa_layers": 2, "stream_mlp": "base", "bigram_rank": 4}
SCHEDULE = AdapterSchedule(epochs=2, tokens_per_batch=256, learning_rate=0.01, evaluate_every=0)
ROWS = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(14)]
TENSORS = "speculative.safetensors"


def write_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base under `models/base`, rows, and the adapter that the command makes of them."""
    folder = tmp_path_factory.mktemp("api")
    make_tiny_base(folder / "models/base/tiny-base")
    write_rows(folder / "rows.jsonl", ROWS)
    words = ["--base", folder / "models/base/tiny-base", "--data", folder / "rows.jsonl", "--valid", "3",
             "--settings", json.dumps(SETTINGS), "--set", "stream_lora_rank=2",
             "--set", "stream_lora_alpha=4", "--epochs", "2", "--tokens-per-batch", "256",
             "--learning-rate", "0.01", "--evaluate-every", "0", "--device", "cpu", "--output",
             folder / "made"]  # fmt: skip
    assert main(["adapter", "sqlctx", *map(str, words)]) == 0
    return SimpleNamespace(folder=folder, base=folder / "models/base/tiny-base", rows=folder / "rows.jsonl",
                           made=folder / "made")  # fmt: skip


def trained(files, output, **changed):
    """The command's adapter, made from Python."""
    given = {
        "app": "sqlctx",
        "base": files.base,
        "data": files.rows,
        "settings": SETTINGS,
        "schedule": SCHEDULE,
        "changes": {"stream_lora_rank": 2, "stream_lora_alpha": 4},
        "inputs": AdapterInputs(valid=3),
        "device": "cpu",
        **changed,
    }
    return train_adapter(output=output, **given)


def test_the_commands_adapter(files, tmp_path):
    reports = []
    adapter = trained(files, tmp_path / "out", report=reports.append)
    assert (tmp_path / "out" / TENSORS).read_bytes() == (files.made / TENSORS).read_bytes()
    assert reports[-1]["step"] == reports[-1]["steps"] and "stream_1" in reports[-1]["parts"]
    loaded = load_adapter(str(tmp_path / "out"))
    assert loaded.config == adapter.config == SpeculativeConfig(
        **SETTINGS, stream_lora_rank=2, stream_lora_alpha=4
    )  # fmt: skip
    for name, tensor in adapter.tensors.items():
        np.testing.assert_array_equal(loaded.tensors[name], tensor.astype(np.float16))


def test_other_ways_to_say_the_same(files, tmp_path, monkeypatch):
    """Application, base by name, several files or rows, settings as an object: the same bytes."""
    monkeypatch.setenv("SS_MODELS", str(files.folder / "models"))
    write_rows(tmp_path / "first.jsonl", ROWS[:6])
    whole = SpeculativeConfig(**SETTINGS, stream_lora_rank=2, stream_lora_alpha=4)
    app, mixed = load_application("sqlctx"), [tmp_path / "first.jsonl", *ROWS[6:]]
    ways = [
        {"app": app, "base": "tiny-base", "data": mixed},
        {"data": iter(ROWS), "settings": whole, "changes": None},
        {"app": app, "settings": json.dumps(SETTINGS)},
    ]  # fmt: skip
    for number, way in enumerate(ways):
        trained(files, str(tmp_path / f"out{number}"), **way)
        assert (tmp_path / f"out{number}" / TENSORS).read_bytes() == (files.made / TENSORS).read_bytes()


def test_presets(files, tmp_path):
    few = {"num_streams": 2, "num_msa_layers": 1}
    plus = inspect.signature(train_adapter).parameters["settings"].default
    for preset, found in (
        ("paper", lambda c: c.mode == "lossless" and not c.bigram_rank),
        (plus, lambda c: c.mode == "lossless" and c.bigram_rank and c.stream_lora_rank),
        ("shared", lambda c: c.mode == "shared" and not c.main_attends_streams),
        ("shared-v2", lambda c: c.mode == "shared" and c.main_attends_streams),
    ):
        short = AdapterSchedule(epochs=0.5, evaluate_every=0)
        adapter = trained(files, tmp_path / preset, settings=preset, changes=few, schedule=short)
        assert found(adapter.config) and adapter.config.num_streams == 2


def test_a_run_that_exists_is_resumed_or_replaced(files, tmp_path):
    trained(files, tmp_path / "out")
    with pytest.raises(UserError, match="holds an adapter already; --force"):
        trained(files, tmp_path / "out")
    trained(files, tmp_path / "out", resume=True)
    trained(files, tmp_path / "out", force=True)
    assert (tmp_path / "out" / TENSORS).read_bytes() == (files.made / TENSORS).read_bytes()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"app": "nothing"}, "unknown application 'nothing'"),
        ({"base": "no-such-base"}, "no-such-base: no such base model folder"),
        ({"data": "none.jsonl"}, "none.jsonl: no such file"),
        ({"data": 7}, "data is int, expected a file, files or rows"),
        ({"data": ROWS[0]}, "data is dict, expected"),
        ({"data": []}, "data: no rows"),
        ({"data": [*ROWS, 3]}, "data row 15 is int"),
        ({"data": [{"question": "q?"}]}, "data row 1: .*context"),
        ({"settings": "best"}, "settings 'best' are neither paper, plus, shared, shared-v2"),
        ({"settings": 3}, "settings are int, expected one of paper"),
        ({"settings": {"streams": 3}}, "streams"),
        ({"changes": {"num_streams": "4"}}, "num_streams"),
        ({"changes": {"num_msa_layers": 9}}, "num_msa_layers 9 exceeds the base model's 3 layers"),
        ({"device": "tpu"}, "--device tpu is not one of"),
        ({"inputs": AdapterInputs(max_length=9999)}, "--max-length 9999 exceeds"),
        ({"inputs": AdapterInputs(start="none")}, "none"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(files, tmp_path, changed, words):
    with pytest.raises(UserError, match=words):
        trained(files, tmp_path / "out", **changed)
    assert not (tmp_path / "out").exists()


def test_names_that_the_package_offers():
    assert {"load_adapter", "train_adapter"} <= set(dir(ss_device))
    with pytest.raises(AttributeError, match="train_adaptor"):
        ss_device.train_adaptor  # noqa: B018
    with pytest.raises(UserError, match="speculative_config.json"):
        load_adapter("no-such-folder")
