"""Every path of the reference on a device that is not the CPU, and what it says there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ss_convert import golden
from ss_convert.graph.options import GraphOptions
from ss_device.adapter import load_adapter, save_adapter
from ss_device.application import load_application
from ss_device.config import paper_config
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.evaluation.replay import replay_continuations
from ss_device.evaluation.report import evaluate_adapter
from ss_device.evaluation.scoring import score_model
from ss_device.evaluation.settings import EvaluationSettings, ScoreSettings
from ss_device.reference.device import VARIABLE, chosen_device
from ss_device.reference.replaced_weights import with_weights
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_base, load_stream_model
from ss_device.training.adapt import AdapterSettings, fit_adapter
from ss_device.training.bigram_bias import train_bigram_bias
from ss_device.training.budget import Budget
from ss_device.training.continuations import KeyedSampling, continuations
from ss_device.training.corpus import Document
from ss_device.training.distill import Prompt, distill
from ss_device.training.finetune import load_lora, train_lora
from ss_device.training.pretrain import pretrain
from ss_device.training.processes import joined_processes
from ss_device.training.recipe import load_recipe
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.settings import (
    BigramBiasSettings,
    Continuation,
    DistillSettings,
    LoRASettings,
    PretrainSettings,
    RunOptions,
)
from tests.ss_device.test_reference import CONTEXT, LOSSLESS, SHARED, prompt_ids
from tests.stand_in_device import StandInDevice
from tests.tiny_models import TINY_RECIPE, VOCAB, make_tiny_base, random_adapter

APP_FILE = """
title = "Tiny"
[prompt]
template = "{prompt}"
completion = "{completion}"
[data]
hub = "nobody/nothing"
columns = { prompt = "prompt", completion = "completion" }
[metric]
name = "exact_match"
reference = "completion"
[stop]
strings = []
max_tokens = 6
"""
PLUS = replace(LOSSLESS["plus"], num_streams=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device that commands find by themselves."""
    with StandInDevice("cuda") as device:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "stand-in")
        yield device
    assert device.operations


def documents(count: int = 4) -> list[Document]:
    rng = np.random.default_rng(3)
    lengths = [(int(rng.integers(2, 6)), int(rng.integers(9, 20))) for _ in range(count)]
    return [Document(rng.integers(3, VOCAB, b).astype(np.int32), a) for a, b in lengths]


def text(model, adapter, nodes=9, kept=6) -> list[int]:
    step_model = ReferenceStepModel(model, nodes, kept, CONTEXT, "draft")
    drafter = Drafter(nodes, bigram_bias=adapter.bigram_bias())
    return [t for s in decode(step_model, drafter, prompt_ids(0), 8) for t in s.tokens]


@pytest.mark.parametrize("name", [*LOSSLESS, *SHARED])
def test_prefill_step_commit_streams_and_pruning(base, name, cuda):
    config = (LOSSLESS | SHARED)[name]
    adapter, kept = random_adapter(base, config), 6 if config.pruning_rank else 9
    on_cpu = load_stream_model(base, adapter)
    there = load_stream_model(base, adapter, device="cuda")
    assert there.device.type == "cuda"
    assert text(there, adapter, kept=kept) == text(on_cpu, adapter, kept=kept)


@pytest.mark.parametrize("prune_over", ["draft", "vocabulary"])
def test_pruning_over_either_set_and_replaced_weights(base, prune_over, cuda):
    adapter = random_adapter(base, PLUS)
    found = {}
    for device in ("cpu", "cuda"):
        model = with_weights(base, base.weights(), adapter, device)
        step_model = ReferenceStepModel(model, 12, 5, CONTEXT, prune_over)
        steps = list(decode(step_model, Drafter(12), prompt_ids(1), 6))
        found[device] = [(s.path, s.verified and s.verified.kept.tolist()) for s in steps]
    assert found["cuda"] == found["cpu"]


def test_metal_has_no_float64(base):
    """Decoding, and the draws of a batch; `generate` itself needs an event, which only Metal has."""
    adapter = random_adapter(base, PLUS)
    expected = text(load_stream_model(base, adapter), adapter)
    scores, ids = torch.randn(2, VOCAB), torch.zeros(2, 5, dtype=torch.long)
    draw = KeyedSampling(Continuation(temperature=0.8, top_p=0.9), [3, 4], [5, 5], 5)
    drawn = draw(ids, scores)
    with StandInDevice("mps") as device:
        with pytest.raises(TypeError, match="MPS"):
            torch.ones(2, device="mps").double()
        model = load_stream_model(base, adapter, device="mps")
        assert text(model, adapter) == expected
        assert torch.equal(draw(ids.to("mps"), scores.to("mps")).cpu(), drawn)
        assert device.operations > 100


def test_the_stand_in_refuses_what_a_gpu_refuses(cuda):
    here, there = torch.arange(3.0), torch.arange(3.0, device="cuda")
    for mixed in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: torch.take_along_dim(there, torch.arange(3), 0),
        lambda: there @ here,
    ):
        with pytest.raises(RuntimeError, match="[Dd]evice"):
            mixed()
    with pytest.raises(TypeError):
        there.numpy()
    assert (there * 2).cpu().tolist() == [0, 2, 4]


@pytest.fixture
def accelerate_there(monkeypatch):
    """accelerate asks PyTorch for its device when its state is first made."""

    def forget():
        for state in (AcceleratorState, PartialState):
            state._reset_state()

    forget()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield forget
    forget()


@pytest.mark.parametrize(
    ("config", "segment"),
    [(PLUS, 0), (PLUS, 6), (SHARED["v2"], 0), (SHARED["v1"], 6)],
    ids=["lossless", "lossless in segments", "shared v2", "shared in segments"],
)
def test_training_of_an_adapter(base, config, segment, tmp_path, cuda, accelerate_there, rows):
    """Steps, validation, checkpoints and a resumed run: the adapter of the CPU up to rounding."""
    schedule = AdapterSchedule(
        epochs=1, tokens_per_batch=40, segment=segment, evaluate_every=2, patience=5, checkpoint_minutes=0
    )
    app, lines, made = load_application(str(rows.parent)), [], {}
    for device in ("cpu", "cuda"):
        made[device] = fit_adapter(
            base, app, AdapterSettings(config, schedule), documents(), documents(2), tmp_path / device,
            RunOptions(device=device), lines.append,
        )  # fmt: skip
        accelerate_there()
    assert cuda.operations > 100 and any("valid" in line for line in lines)
    here, there = made["cpu"], made["cuda"]
    for name, loss in here.record["final_losses"].items():
        assert abs(loss - there.record["final_losses"][name]) < 1e-3, name
    assert here.rank_statistics == there.rank_statistics
    for name, tensor in here.tensors.items():  # Adam makes a whole step of a gradient that is all but zero
        assert np.abs(tensor - there.tensors[name]).mean() < 1e-5, name
    (tmp_path / "cuda").rename(tmp_path / "first")
    again = fit_adapter(
        base,
        load_application(str(rows.parent)),
        AdapterSettings(config, schedule),
        documents(),
        documents(2),
        tmp_path / "cuda",
        RunOptions(resume=True, device="cuda"),
    )
    for name, tensor in made["cuda"].tensors.items():
        assert np.array_equal(tensor, again.tensors[name]), name


def test_a_base_is_trained(tmp_path, cuda, accelerate_there, monkeypatch):
    """A stretch, its checkpoint and a further one, without the compiler: loss and weights as on the CPU."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    (tmp_path / "recipe.toml").write_text(TINY_RECIPE)
    rows = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe, lines, compiled, weights = load_recipe(tmp_path / "recipe.toml"), {}, [], {}
    for device in ("cpu", "cuda"):
        output, lines[device] = tmp_path / device, []
        for resume in (False, True):
            run = RunOptions(resume=resume, device=device)
            settings = PretrainSettings(precision="fp32")
            pretrain(recipe, tmp_path, output, Budget(steps=3), settings, run, lines[device].append)
            accelerate_there()
        weights[device] = load_file(output / "model.safetensors")
    assert len(compiled) == 2  # on the GPU alone
    assert abs(lines["cpu"][-1]["loss"] - lines["cuda"][-1]["loss"]) < 2e-3
    for name, tensor in weights["cpu"].items():
        assert np.abs(tensor.astype(np.float32) - weights["cuda"][name]).mean() < 1e-3, name


def test_lora_bigram_bias_and_score(base, tmp_path, cuda, rows):
    schedule = AdapterSchedule(epochs=1, tokens_per_batch=60)
    train_lora(
        base,
        load_application(str(rows.parent)),
        LoRASettings(4, 8.0),
        schedule,
        documents(),
        tmp_path / "lora",
        RunOptions(device="cuda"),
    )
    ids = torch.tensor([prompt_ids(2)])
    there = load_lora(base, tmp_path / "lora", "cuda")(input_ids=ids.to("cuda")).logits
    here = load_lora(base, tmp_path / "lora")(input_ids=ids).logits
    assert there.device.type == "cuda" and torch.allclose(there.cpu(), here, atol=1e-5)
    biases = [
        train_bigram_bias(documents(), VOCAB, BigramBiasSettings(4, 2), device=d) for d in ("cuda", "cpu")
    ]
    for name in biases[0]:
        assert np.allclose(biases[0][name], biases[1][name], atol=1e-6)
    settings = ScoreSettings(limit=2, max_tokens=6, lora=tmp_path / "lora")
    scores = [score_model(str(rows.parent), base.path, rows, settings, device=d) for d in ("cuda", "cpu")]
    assert scores[0] == scores[1]


def test_distillation(base, tmp_path, cuda):
    tokenizer = Tokenizer.from_file(str(base.path / "tokenizer.json"))
    asked = [Prompt(tuple(prompt_ids(seed, 5 + seed)), f"p{seed}") for seed in range(3)]
    settings = DistillSettings(6, temperature=0.7, top_p=0.9, stop_strings=("zz",), samples=2)
    for device in ("cuda", "cpu"):
        output = tmp_path / f"{device}.jsonl"
        model = load_base(base, device=device)
        distill(model, tokenizer, asked, output, (2,), settings, {"app": "tiny"})
    assert (tmp_path / "cuda.jsonl").read_text() == (tmp_path / "cpu.jsonl").read_text()


def test_replay(base, cuda):
    adapter, prompts = random_adapter(base, PLUS), [prompt_ids(s) for s in range(3)]
    found = []
    for device in ("cuda", "cpu"):
        model = load_stream_model(base, adapter, device=device)
        texts = continuations(model.base, None, prompts, (2,), Continuation(6))
        counts = replay_continuations(
            model, [Drafter(8), Drafter(4, "chain")], prompts, texts, frozenset({2}), 6
        )
        found.append((texts, counts))
    assert found[0] == found[1]


def test_golden_traces(base, cuda):
    adapter = random_adapter(base, LOSSLESS["paper"])
    sizes = GraphOptions(num_nodes=8, num_kept=5, context=64, chunk=8)
    prompts = [("a", prompt_ids(0)), ("b", prompt_ids(4))]
    (there, origin), (here, other) = (
        golden.record_traces(base, adapter, prompts, sizes, device=d) for d in (None, "cpu")
    )
    assert origin.device == "cuda (stand-in)" and other.device == "cpu"
    assert {"torch", "transformers", "ss-device"} <= set(origin.versions) and origin.dtype == "float32"
    for one, two in zip(there, here, strict=True):
        assert one.generated == two.generated and abs(one.first_margin - two.first_margin) < 1e-4
        for a, b in zip(one.steps, two.steps, strict=True):
            assert a.path == b.path and np.array_equal(a.chosen, b.chosen)
            assert np.allclose(a.probe_logits, b.probe_logits, atol=1e-4)


@pytest.fixture
def rows(tmp_path):
    """Rows of an application in its folder."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "app.toml").write_text(f'name = "tiny"{APP_FILE}')
    lines = [{"prompt": f"ab{i}", "completion": "x"} for i in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


def test_evaluate(base, tmp_path, cuda, rows):
    save_adapter(
        random_adapter(base, paper_config(num_streams=2, num_msa_layers=2)),
        base.architecture,
        tmp_path / "a",
    )
    assert load_adapter(tmp_path / "a").app == "tiny"
    settings = EvaluationSettings(2, 6, app=str(rows.parent), num_nodes=6, num_kept=4)
    found = [
        evaluate_adapter(tmp_path / "a", base.path, rows, settings, device) for device in (None, "cpu")
    ]
    assert found[0] == found[1] and found[0]["calls"] > 0


def test_a_device_that_is_not_there_loses_nothing(base, tmp_path, rows, monkeypatch):
    """Every training run: the device is refused before --force clears what an earlier run left."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app, schedule = load_application(str(rows.parent)), AdapterSchedule(epochs=1)
    (tmp_path / "recipe.toml").write_text(TINY_RECIPE)
    recipe, output = load_recipe(tmp_path / "recipe.toml"), tmp_path / "out"
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run/log.jsonl").write_text("earlier")
    there, settings = RunOptions(force=True, device="cuda"), AdapterSettings(PLUS, schedule)
    for run in (
        lambda: train_lora(base, app, LoRASettings(4, 8.0), schedule, documents(), output, there),
        lambda: fit_adapter(base, app, settings, documents(), [], output, there),
        lambda: pretrain(recipe, tmp_path, output, Budget(steps=1), run=there),
    ):
        with pytest.raises(UserError, match="--device cuda"):
            run()
        assert (tmp_path / "out.run/log.jsonl").read_text() == "earlier" and not output.exists()


def test_which_device(monkeypatch):
    """An option, the environment, a GPU, Metal, the CPU; a device that is not there is refused."""
    there = {"cuda": False, "mps": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there["cuda"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there["mps"])
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match="--device cuda: PyTorch .* finds none here .it has cpu"):
        chosen_device("cuda")
    with pytest.raises(UserError, match="--device tpu is not one of cuda, mps, cpu"):
        chosen_device("tpu")
    assert chosen_device().type == "cpu"
    there["mps"] = True
    assert chosen_device().type == "mps" and chosen_device("cpu").type == "cpu"
    there["cuda"] = True
    assert chosen_device().type == "cuda" and chosen_device("mps").type == "mps"
    monkeypatch.setenv(VARIABLE, "cpu")
    assert chosen_device().type == "cpu" and chosen_device("cuda").type == "cuda"
    assert joined_processes().device.type == "cpu"
    monkeypatch.setenv(VARIABLE, "gpu")
    with pytest.raises(UserError, match="SS_DEVICE=gpu is not one of"):
        chosen_device()
