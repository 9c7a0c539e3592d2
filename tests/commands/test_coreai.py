"""ss-convert --target coreai and what runs its bundles: validation, damage, additions, refusals."""

from __future__ import annotations

import json
import shutil
from importlib import util

import numpy as np
import pytest

pytest.importorskip("coreai", reason="coreai-core is not installed")

from ss_convert import coreai_options
from ss_convert.command import main as ss_convert
from ss_convert.graph import cache, streams
from ss_convert.graph.tables import own_stream_mask
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.test_parts import OTHER
from tests.tiny_models import random_adapter

SIZES = ("--nodes", "8", "--keep", "5", "--context", "64", "--prefill", "16")
ASSET = "coreai/tiny-base.aimodel"


def converted(models, output, *more):
    words = ("--adapter", "tiny", "--models", models, "--output", output, *SIZES, *more)
    return ss_convert([str(word) for word in words])


@pytest.fixture(scope="module")
def three(models, tmp_path_factory):
    """A bundle for all three runtimes."""
    output = tmp_path_factory.mktemp("coreai") / "three"
    assert converted(models, output, "--target", "mlx,coreml,coreai") == 0
    return output


def validated(capsys, bundle, *more) -> dict:
    """What ss-validate says, by back end and dtype."""
    capsys.readouterr()
    status = ss_validate([str(bundle), "--json", *more])
    results = json.loads(capsys.readouterr().out)["results"]
    assert status == (0 if all(result["passed"] for result in results) else 1)
    return {(result["backend"], result["dtype"]): result for result in results}


def test_three_runtimes_replay_the_same_traces(three, capsys):
    found = validated(capsys, three)
    assert set(found) == {
        ("mlx", "float32"),
        *((name, dtype) for name in ("executor", "coreai") for dtype in ("float32", "float16")),
    }
    assert all(result["passed"] for result in found.values())
    exact = found["coreai", "float32"]
    assert exact["token_exact"] == exact["prompts"] > 0 and exact["max_logit_difference"] < 1e-3


@pytest.mark.parametrize(
    "more",
    [
        ("--preset", "gpu", "--sampling"),
        ("--preset", "ane"),
        ("--parts", "2"),
        ("--weights", "int8"),
        ("--weights", "int4", "--preset", "gpu"),
        ("--weights", "lut4"),
        ("--weights", "lut6", "--preset", "gpu"),
        ("--coreai-cache", "inputs"),
    ],
    ids=" ".join,
)
def test_forms_of_assets_replay_what_the_reference_recorded(models, tmp_path, capsys, more):
    assert converted(models, tmp_path / "b", "--target", "coreai", *more) == 0
    found = validated(capsys, tmp_path / "b")
    assert set(found) == {("coreai", "float32"), ("coreai", "float16")}
    assert all(result["passed"] for result in found.values())
    entry = open_bundle(tmp_path / "b").adapter().coreai
    assert (entry.golden is not None) == ("--weights" in more)
    given = "ane" in more or "inputs" in more
    assert entry.graph.get("cache", "state") == ("inputs" if given else "state")


def test_generate_answers_as_on_mlx(three, capsys):
    answers = []
    for name in ("mlx", "coreai"):
        words = ["--bundle", three, "--backend", name, "--dtype", "float32", "--prompt", "table", "--json"]
        capsys.readouterr()
        assert ss_generate([str(word) for word in words]) == 0
        answers.append(json.loads(capsys.readouterr().out.splitlines()[0]))
    assert answers[0]["text"] == answers[1]["text"]


def swapped(monkeypatch):
    """Two weights of equal shape exchanged in the graph alone."""
    from ss_convert.graph.weights import BaseWeights

    stored = BaseWeights.stored
    a, b = "layers.2.attn.q.weight", "layers.2.attn.o.weight"
    monkeypatch.setattr(
        BaseWeights, "stored", lambda self, name: stored(self, {a: b, b: a}.get(name, name))
    )


def seeing_later_streams(monkeypatch):
    def wrong(config, num_kept):
        mask = own_stream_mask(config, num_kept).copy()
        blocks = np.kron(np.eye(num_kept), np.ones((config.num_streams,) * 2))
        mask[num_kept:][blocks == 1] = 0
        return mask

    monkeypatch.setattr(streams, "own_stream_mask", wrong)


def committing_other_rows(monkeypatch):
    selected = cache._selected
    monkeypatch.setattr(
        cache, "_selected", lambda rows, indices: selected(rows, cache.op.maximum(indices, np.int32(1)))
    )


@pytest.mark.parametrize("mutation", [swapped, seeing_later_streams, committing_other_rows])
def test_a_wrong_graph_is_not_converted(models, tmp_path, capsys, monkeypatch, mutation):
    """A conversion runs what it wrote: neither a bundle nor a part of one is left."""
    mutation(monkeypatch)
    assert converted(models, tmp_path / "b", "--target", "coreai") == 2
    assert "check failed: Core AI asset against the reference" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_an_adapter_is_added_and_the_first_one_stays(models, tmp_path, capsys):
    base = open_base(models / "base" / "tiny-base")
    save_adapter(random_adapter(base, OTHER, seed=5, app="other"), base.architecture, tmp_path / "other")
    assert converted(models, tmp_path / "b", "--target", "mlx,coreai") == 0
    first = open_bundle(tmp_path / "b").adapter("tiny").coreai
    words = ("--adapter", tmp_path / "other", "--models", models, "--into", tmp_path / "b")
    assert ss_convert([str(word) for word in words]) == 0
    bundle = open_bundle(tmp_path / "b", verify=True)
    assert bundle.adapter("tiny").coreai == first
    assert bundle.adapter("other").coreai.package == first.package == ASSET
    found = validated(capsys, tmp_path / "b", "--adapter", "tiny", "--backend", "coreai:float32")
    assert found["coreai", "float32"]["passed"]
    words = [
        "--bundle",
        tmp_path / "b",
        "--adapter",
        "other",
        "--prompt",
        "table",
        "--json",
        "--dtype",
        "float32",
    ]
    texts = []
    for name in ("mlx", "coreai"):
        capsys.readouterr()
        assert ss_generate([*map(str, words), "--backend", name]) == 0
        texts.append(json.loads(capsys.readouterr().out.splitlines()[0])["text"])
    assert texts[0] == texts[1]


def test_a_damaged_asset_never_reaches_the_runtime(refuses, three, tmp_path):
    bundle = shutil.copytree(three, tmp_path / "damaged")
    file = bundle / ASSET / "main.mlirb"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    words = ("--bundle", bundle, "--backend", "coreai", "--prompt", "table")
    says = (f"file '{ASSET}/main.mlirb' was changed after the conversion (sha256)",)
    refuses(ss_generate, *words, says=says)


def test_what_core_ai_cannot_do_is_one_line(refuses, models, three, tmp_path, monkeypatch):
    words = ("--adapter", "tiny", "--models", models, "--output", tmp_path / "b")
    refuses(ss_convert, *words, "--coreai-cache", "inputs", says=("--coreai-cache is for --target coreai",))
    refuses(ss_convert, *words, "--target", "coreai,tpu", says=("invalid choice: 'tpu'",))
    generate = ("--bundle", three, "--prompt", "table")
    units = ("--compute-units", "ane")
    refuses(
        ss_generate, *generate, "--backend", "mlx", *units, says=("for back ends 'coreml' and 'coreai'",)
    )
    refuses(
        ss_generate, *generate, "--backend", "coreai", "--quantize", "4", says=("leave --quantize out",)
    )
    monkeypatch.setattr(coreai_options, "find_spec", lambda name: None)
    refuses(ss_convert, *words, "--target", "coreai", says=("needs coreai-core, which is not installed",))
    there = util.find_spec
    monkeypatch.setattr(
        "ss_runtime.backends.find_spec", lambda name: None if name == "coreai" else there(name)
    )
    refuses(ss_generate, *generate, "--backend", "coreai", says=("coreai is not installed",))
