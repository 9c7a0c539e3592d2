"""`scripts.device_check` on tiny models and a CPU: every check, and one that fails among others."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scripts import device_check
from ss_device.adapter import save_adapter
from ss_device.config import SpeculativeConfig
from tests.tiny_models import make_tiny_base, random_adapter

ROWS = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(3)]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("check")
    # NF4 has blocks of 64 values.
    base = make_tiny_base(folder / "tiny-base", hidden_size=64, intermediate_size=128, head_dim=16)
    config = SpeculativeConfig(num_streams=2, num_msa_layers=2, bigram_rank=4)
    adapter = replace(random_adapter(base, config, app="sqlctx"), prompt_template="{context} {question}")
    save_adapter(adapter, base.architecture, folder / "adapter")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "--adapter", str(folder / "adapter"), "--base", str(folder / "tiny-base"), "--device", "cpu",
        "--data", str(folder / "rows.jsonl"), "--max-tokens", "6", "--rounds", "1", "--json",
    ]  # fmt: skip


def test_every_check(words, capfd, tmp_path):
    assert device_check.main([*words, "--output", str(tmp_path / "found.json")]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == json.loads((tmp_path / "found.json").read_text()) and found["device"] == "cpu"
    checks = found["checks"]
    assert set(checks) == set(device_check.CHECKS) and all(check["passed"] for check in checks.values())
    assert checks["golden traces"]["mlx float32"] == "3 of 3 exact"
    assert checks["decoding float32"]["equal"] == "3 of 3" and checks["evaluate"]["equal"]
    for name in ("plain", "hf", "drafts"):
        assert checks["decoding bfloat16"][f"{name} tokens/s"] > 0
    assert all(checks[f"training {name}"]["tokens/s"] > 0 for name in device_check.TRAININGS)


def test_a_check_that_fails_or_breaks_does_not_stop_the_others(words, capfd, monkeypatch):
    seen = []

    def differing(*arguments, **settings):
        seen.append(settings["device"])
        return {"tokens_per_call": float(len(seen)), "tokens": 5}

    def breaking(setting):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(device_check, "evaluate_adapter", differing)
    monkeypatch.setitem(device_check.CHECKS, "decoding float32", breaking)
    only = ("evaluate", "decoding float32", "replay and distill")
    more = [word for name in only for word in ("--only", name)]
    assert device_check.main([*words, *more]) == 1
    checks = json.loads(capfd.readouterr().out)["checks"]
    assert [checks[name]["passed"] for name in only] == [False, False, True]
    assert not checks["evaluate"]["equal"] and "out of memory" in checks["decoding float32"]["error"]
