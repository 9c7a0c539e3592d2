"""Adapter training on a tiny model: batches, losses, gradients, resume, and the folders it writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from ss_device.adapter import load_adapter, write_speculative_files
from ss_device.application import Application
from ss_device.config import SpeculativeConfig, paper_config, parameter_count
from ss_device.errors import UserError
from ss_device.evaluation.validation_check import decode_validation
from ss_device.reference.stream_model import load_stream_model
from ss_device.training.adapt import AdapterSettings, build_stream_model, fit_adapter
from ss_device.training.checkpoint import trainable
from ss_device.training.corpus import Document
from ss_device.training.loop import TrainingRun
from ss_device.training.losses import forward, make_batch
from ss_device.training.objective import StreamLoss
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.settings import RunOptions
from ss_device.training.validation import document_ranks, rank_statistics, tokens_per_call
from tests.tiny_models import make_tiny_base, random_adapter

APP = Application(
    name="tiny", title="", template="{prompt}", completion="{text}", hub="", columns={},
    metric="exact_match", reference="text", stop_strings=(), max_tokens=16,
)  # fmt: skip
PLUS = SpeculativeConfig(
    num_streams=3, num_msa_layers=2, stream_mlp="base", stream_lora_rank=4, stream_lora_alpha=8,
    bigram_rank=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


def documents(count: int = 12, seed: int = 0) -> list[Document]:
    """Completions that count upwards: easy to draft once seen."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = rng.integers(3, 250, int(rng.integers(2, 6)))
        completion = (np.arange(int(rng.integers(4, 9))) + prompt[-1] + 1) % 250 + 3
        ids = np.concatenate([[1], prompt, completion, [2]]).astype(np.int32)
        out.append(Document(ids, 1 + len(prompt)))
    return out


def test_batch_targets_by_hand():
    """Rows start at the last prompt token; stream j at i predicts x[i+1+j], parent x[i+j]."""
    short = Document(np.array([1, 10, 11, 12, 2], np.int32), 3)
    long = Document(np.array([1, 20, 21, 22, 23, 2], np.int32), 2)
    batch = make_batch([short, long], num_streams=2)
    assert batch.rows.tolist() == [[2, 3, 6, 6], [1, 2, 3, 4]]
    assert batch.main_targets.tolist() == [[12, 2, -100, -100], [21, 22, 23, 2]]
    assert batch.targets[0].tolist() == [[2, -100], [-100, -100], [-100, -100], [-100, -100]]
    assert batch.targets[1].tolist() == [[22, 23], [23, 2], [2, -100], [-100, -100]]
    assert batch.parents[1].tolist() == [[21, 22], [22, 23], [23, 0], [0, 0]]


def test_training_forward_equals_one_document_at_a_time(base):
    """Padding and the other documents of a batch change nothing."""
    model = build_stream_model(base, PLUS, 0)
    with torch.no_grad():
        for parameter in model.parts.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(3)))
        docs = documents(3)
        together = forward(model, make_batch(docs, 3), main=True, early=True)
        for index, document in enumerate(docs):
            alone = forward(model, make_batch([document], 3), main=True, early=True)
            count = alone.streams.shape[1]
            torch.testing.assert_close(
                together.streams[index, :count], alone.streams[0], rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(together.main[index, :count], alone.main[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(together.early[index, :count], alone.early[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attends", [False, True])
def test_training_forward_equals_the_decoding_step(base, attends):
    """The streams that training sees are the streams that a step computes."""
    from ss_device.decoding import Drafter, decode
    from ss_device.reference.step_model import ReferenceStepModel

    config = paper_config("shared", num_streams=3, num_msa_layers=2, lora_rank=4, lora_alpha=8,
                          main_attends_streams=attends)  # fmt: skip
    model = build_stream_model(base, config, 0).eval()
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(5)))
    prompt = [1, 30, 40, 50]
    steps = list(decode(ReferenceStepModel(model, 1, 1, 64), Drafter(1), prompt, 8))
    text = prompt + [t for s in steps for t in s.tokens]
    with torch.no_grad():
        batch = make_batch([Document(np.array(text, np.int32), len(prompt))], 3)
        out = forward(model, batch, main=True, early=False)
    for row, step in enumerate(steps[1:], 1):
        np.testing.assert_allclose(
            out.streams[0, row].numpy(), step.verified.stream_logits, rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(out.main[0, row].numpy(), step.verified.logits[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_every_part_gets_a_gradient_and_the_base_none(base, mode):
    sizes = {"num_streams": 2, "num_msa_layers": 2, "lora_rank": 4, "lora_alpha": 8}
    config = PLUS if mode == "lossless" else paper_config("shared", **sizes)
    model = build_stream_model(base, config, 0)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    loss, parts = StreamLoss(model)(make_batch(documents(4), config.num_streams))
    loss.backward()
    names = trainable(model)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in names.values())
    assert all(n.startswith("parts.") or ".lora_" in n for n in names)
    assert ("main" in parts) == (mode == "shared") and "early" in parts


def test_training_learns_resumes_and_writes_a_loadable_folder(base, tmp_path, monkeypatch):
    """A run cut off and resumed ends with the weights of the uninterrupted run, bit for bit."""
    schedule = AdapterSchedule(epochs=3, tokens_per_batch=64, learning_rate=1e-2, checkpoint_minutes=0.0)
    docs = documents(24)
    logs: list[dict] = []
    whole = fit_adapter(
        base, APP, AdapterSettings(PLUS, schedule), docs, docs[:6], tmp_path / "a", report=logs.append
    )
    assert logs[-1]["parts"]["stream_1"] < logs[0]["parts"]["stream_1"]

    class Killed(Exception):
        pass

    calls = []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise Killed
        return original(*arguments)

    original = TrainingRun._step
    monkeypatch.setattr(TrainingRun, "_step", killed)
    with pytest.raises(Killed):
        fit_adapter(base, APP, AdapterSettings(PLUS, schedule), docs, docs[:6], tmp_path / "b")
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(TrainingRun, "_step", original)
    resumed = fit_adapter(
        base, APP, AdapterSettings(PLUS, schedule), docs, docs[:6], tmp_path / "b", RunOptions(resume=True)
    )
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(tensor, resumed.tensors[name], err_msg=name)
    loaded = load_adapter(tmp_path / "a")
    loaded.check_base(base)
    assert load_stream_model(base, loaded).config == PLUS
    raw = json.loads((tmp_path / "a/speculative_config.json").read_text())
    assert raw["parameters"] == parameter_count(PLUS, base.architecture)
    assert sum(raw["rank_statistics"]["counts"][0]) > 0
    with pytest.raises(UserError, match="other settings"):
        other = AdapterSchedule(epochs=4, tokens_per_batch=64)
        fit_adapter(
            base, APP, AdapterSettings(PLUS, other), docs, docs[:6], tmp_path / "a", RunOptions(resume=True)
        )


def test_shared_adapter_is_loadable_by_peft(base, tmp_path):
    """The LoRA files are PEFT's own: peft alone reproduces the main stream."""
    from peft import PeftModel

    from ss_device.reference.stream_model import load_base

    config = paper_config("shared", num_streams=2, num_msa_layers=2, lora_rank=4, lora_alpha=8)
    schedule = AdapterSchedule(epochs=1, tokens_per_batch=64, learning_rate=1e-2)
    fit_adapter(base, APP, AdapterSettings(config, schedule), documents(12), documents(3), tmp_path / "s")
    adapter = load_adapter(tmp_path / "s")
    ours = load_stream_model(base, adapter)
    theirs = PeftModel.from_pretrained(load_base(base), tmp_path / "s")
    ids = torch.tensor([[1, 9, 8, 7, 6]])
    with torch.no_grad():
        torch.testing.assert_close(ours.base(input_ids=ids).logits, theirs(input_ids=ids).logits)
        assert (theirs(input_ids=ids).logits - load_base(base)(ids).logits).abs().max() > 1e-3


def test_rank_statistics_count_every_target(base):
    model, chosen = build_stream_model(base, PLUS, 0), documents(5)
    batch = make_batch(chosen, 3)
    ranks = document_ranks(StreamLoss(model), chosen, 3, torch.device("cpu"))
    counts = rank_statistics(ranks)["counts"]
    for j in range(3):
        assert sum(counts[j]) == int((batch.targets[..., j] != -100).sum())


def test_joint_ranks_by_hand():
    """Columns: early exit, then two streams; rows with a missing target count for single depths only."""
    ranks = [np.array([[0, 0, 0], [5, 0, 40], [1, 2, -1]]), np.array([[0, 0, 0], [0, 3, 1]])]
    found = rank_statistics(ranks, depth=4)
    assert found["joint"] == {"0 0": 2, "0 4": 1, "3 1": 1}
    assert list(found["joint"])[0] == "0 0"
    assert found["counts"] == [[3, 0, 1, 1, 0], [2, 1, 0, 0, 1]]
    assert found["top1"] == [0.6, 0.5]


def test_the_record_says_what_validation_predicts(base, tmp_path):
    held = documents(5, seed=9)
    schedule = AdapterSchedule(epochs=1, tokens_per_batch=64, learning_rate=1e-2, evaluate_every=0)
    fit_adapter(base, APP, AdapterSettings(PLUS, schedule), documents(), held, tmp_path / "a")
    adapter = load_adapter(tmp_path / "a")
    model = load_stream_model(base, adapter)
    ranks = document_ranks(StreamLoss(model, schedule), held, PLUS.num_streams, torch.device("cpu"))
    # Parts are stored in half precision, which may move a rank.
    said = adapter.record["validation"]
    assert said["documents"] == 5
    assert said["tokens_per_call"] == pytest.approx(tokens_per_call(ranks, 1), rel=0.1)


def test_an_adapter_without_a_prediction_cannot_be_checked(base, tmp_path):
    write_speculative_files(random_adapter(base, PLUS), base.architecture, tmp_path)
    with pytest.raises(UserError, match="its training recorded no validation"):
        decode_validation(tmp_path, base.path, tmp_path / "own.jsonl", 64)
