"""`ss-validate --record` on one machine, `--traces` on another: what is written, replayed and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.trace import load_traces, trace_record
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import rewrite_manifest
from tests.stand_in_device import StandInDevice
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(num_streams=3, num_msa_layers=2, bigram_rank=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A bundle (both targets, pruning) with golden traces, and one whose package is compressed."""
    models = tmp_path_factory.mktemp("models")
    base = make_tiny_base(models / "base/tiny-base", dtype="float16")
    folder = models / "adapters/one"
    save_adapter(random_adapter(base, CONFIG, app="one"), base.architecture, folder)
    (folder / "golden_prompts.jsonl").write_text('{"prompt": "SELECT a"}\n{"prompt": "b"}\n')
    sizes = ["--models", models, "--adapter", "one", "--nodes", 8, "--keep", 5, "--context", 64]
    for name, more in (("plain", []), ("packed", ["--weights", "int8"])):
        words = [*sizes, "--output", models / name, "--device", "cpu", *more]
        assert ss_convert([*map(str, words)]) == 0
    return models


@pytest.fixture
def recorded(made, tmp_path) -> Path:
    folder = tmp_path / "traces"
    assert ss_validate([str(made / "plain"), "--record", str(folder)]) == 0
    return folder


def in_json(capfd, *words) -> tuple[int, dict]:
    capfd.readouterr()
    code = ss_validate([*map(str, words), "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_a_recording_is_the_bundles_golden_traces(made, recorded, capfd):
    """The same prompts, weights, trees and pruning: the same steps. It says where it was made."""
    bundle = open_bundle(made / "plain")
    golden = load_traces(bundle.path / bundle.adapter("one").golden)
    assert len(golden) == 2 and any(len(s.kept) < s.tree.num_nodes for t in golden for s in t.steps)
    for theirs, ours in zip(golden, load_traces(recorded / "one"), strict=True):
        assert theirs.generated == ours.generated
        for a, b in zip(theirs.steps, ours.steps, strict=True):
            assert a.path == b.path and np.array_equal(a.kept, b.kept)
    origin = trace_record(recorded / "one")
    assert origin.device == "cpu" and origin.dtype == "float32"
    assert origin.versions["torch"] == torch.__version__ and "ss-device" in origin.versions
    assert trace_record(bundle.path / bundle.adapter("one").golden).base == origin.base
    code, found = in_json(capfd, made / "plain", "--traces", recorded)
    assert code == 0 and found["passed"]
    assert {r["backend"] for r in found["results"]} == {"mlx", "executor"}
    for result in found["results"]:
        assert result["token_exact"] == result["prompts"] == 2 and result["exact_weights"]
        assert result["recorded"]["device"] == "cpu" and result["recorded"]["weights"] == origin.weights


def test_prompts_of_a_file(made, tmp_path, capfd):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": "z"}\n')
    words = ["--record", tmp_path / "t", "--prompts", tmp_path / "rows.jsonl", "--limit", 2]
    code, found = in_json(capfd, made / "plain", *words)
    (only,) = found["recorded"]
    assert code == 0 and only["prompts"] == 2 and only["tokens"] > only["calls"] - 2
    assert [t.text for t in load_traces(tmp_path / "t/one")] == ["x", "y"]
    assert ss_validate([str(made / "plain"), "--record", str(tmp_path / "u"), "--limit", "1"]) == 0
    assert "one: 1 prompts" in (said := capfd.readouterr().out) and "cpu, float32, torch" in said


def test_recorded_on_cuda_and_replayed_here(made, tmp_path, monkeypatch, capfd):
    """On the device that stands in for a GPU; the text of drafts and of plain steps there too."""
    bundle, said = str(made / "plain"), {}
    with StandInDevice("cuda") as device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "stand-in")
        assert ss_validate([bundle, "--record", str(tmp_path / "t"), "--device", "cuda"]) == 0
        words = ["--bundle", bundle, "--prompt", "ab", "--max-tokens", "6", "--json"]
        for name, more in (("drafts", []), ("plain", ["--plain"])):
            capfd.readouterr()
            assert ss_generate([*words, "--backend", "reference", "--device", "cuda", *more]) == 0
            said[name] = json.loads(capfd.readouterr().out)["text"]
        assert device.operations > 1000
    monkeypatch.undo()
    assert trace_record(tmp_path / "t/one").device == "cuda (stand-in)"
    code, found = in_json(capfd, bundle, "--traces", tmp_path / "t")
    assert code == 0 and all(r["token_exact"] == 2 for r in found["results"])
    assert ss_validate([bundle, "--traces", str(tmp_path / "t")]) == 0
    assert "traces recorded on cuda (stand-in), float32, torch" in capfd.readouterr().out
    assert ss_generate([*words, "--backend", "mlx", "--dtype", "float32"]) == 0
    assert said["drafts"] == said["plain"] == json.loads(capfd.readouterr().out)["text"]


def test_a_recording_in_half_precision_is_no_exact_one(made, tmp_path, capfd):
    assert ss_validate([str(made / "plain"), "--record", str(tmp_path / "t"), "--dtype", "float16"]) == 0
    assert trace_record(tmp_path / "t/one").dtype == "float16"
    code, found = in_json(capfd, made / "plain", "--traces", tmp_path / "t", "--backend", "mlx:float32")
    assert not found["results"][0]["exact_weights"]


def test_changed_traces_fail(made, recorded, capfd):
    arrays = load_file(recorded / "one.safetensors")
    arrays["probe_logits"] = arrays["probe_logits"] + 1
    save_file(arrays, recorded / "one.safetensors")
    code, found = in_json(capfd, made / "plain", "--traces", recorded, "--backend", "mlx:float32")
    assert code == 1 and "stream logits differ" in found["results"][0]["failures"][0]


def test_compressed_packages_have_traces_of_their_own(made, recorded, refuses, capfd):
    """A recording is of MLX's weights: the package is left out, and refused by name."""
    packed = made / "packed"
    bundle, plain = open_bundle(packed), open_bundle(made / "plain")
    assert bundle.weights_digest(bundle.adapter("one")) == plain.weights_digest(plain.adapter("one"))
    code, found = in_json(capfd, packed, "--traces", recorded)
    assert code == 0 and [r["backend"] for r in found["results"]] == ["mlx"]
    assert all("compressed weights" in entry["reason"] for entry in found["left_out"])
    words = (str(packed), "--traces", str(recorded), "--backend", "executor")
    refuses(ss_validate, *words, says="compressed weights")


def test_refusals(made, recorded, tmp_path, refuses, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bundle = str(made / "plain")
    refuses(ss_validate, bundle, "--record", str(recorded), says="holds traces already; --force replaces")
    assert ss_validate([bundle, "--record", str(recorded), "--force"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    refuses(ss_validate, bundle, "--record", str(tmp_path / "mine"), "--force", says="another --record")
    both = (bundle, "--record", str(tmp_path / "t"), "--backend", "mlx")
    refuses(ss_validate, *both, says="--record replays nothing")
    refuses(ss_validate, bundle, "--prompts", "x.jsonl", says="--prompts is for --record")
    refuses(ss_validate, bundle, "--device", "cpu", says="--device is for --record and --backend reference")
    to = ("--record", str(tmp_path / "t"))
    refuses(ss_validate, bundle, *to, "--device", "cuda", says="--device cuda: PyTorch")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n{"prompt": "' + "x" * 65 + '"}\n')
    rows = str(tmp_path / "rows.jsonl")
    longer = "rows.jsonl:2: the prompt has 66 tokens, the context holds 64"
    refuses(ss_validate, bundle, *to, "--prompts", rows, says=longer)
    assert not (tmp_path / "t").exists()
    refuses(
        ss_validate, bundle, "--traces", str(tmp_path / "mine"), says="no traces of 'one' (found: none)"
    )
    generate = ("--bundle", bundle, "--prompt", "a", "--device", "cpu", "--backend", "mlx")
    refuses(ss_generate, *generate, says="--device is for back end 'reference'")
    convert = ("--models", str(made), "--adapter", "one", "--output", str(tmp_path / "b"))
    refuses(ss_convert, *convert, "--device", "cuda", says="finds none here")
    refuses(
        ss_convert, *convert, "--device", "cpu", "--no-golden", says="it has no effect with --no-golden"
    )


def test_traces_of_other_weights(made, recorded, tmp_path, refuses):
    changed = Path(shutil.copytree(made / "plain", tmp_path / "changed"))
    file = changed / "mlx/adapters/one.safetensors"
    tensors = load_file(file)
    tensors["stream_embeddings"] = tensors["stream_embeddings"] * np.float16(2)
    save_file(tensors, file)
    rewrite_manifest(changed)
    refuses(ss_validate, str(changed), "--traces", str(recorded), says="recorded with other weights")
