"""Families through training, adapter folder, ss-convert and ss-validate."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel

from ss_convert.command import main as ss_convert
from ss_device.adapter import load_adapter
from ss_device.application import Application
from ss_device.config import paper_config
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_base, load_stream_model
from ss_device.training.adapt import AdapterSettings, build_stream_model, fit_adapter
from ss_device.training.corpus import Document
from ss_device.training.losses import forward, make_batch
from ss_device.training.objective import StreamLoss
from ss_device.training.schedule import AdapterSchedule
from ss_runtime.commands.validate import main as ss_validate
from tests.families.back_ends import make_subject
from tests.families.checks import LOSSLESS, relative
from tests.families.tiny import CASES, CONTEXT, make_base

APP = Application(
    name="tiny", title="", template="{prompt}", completion="{text}", hub="", columns={},
    metric="exact_match", reference="text", stop_strings=(), max_tokens=16,
)  # fmt: skip
SHARED = paper_config("shared", num_streams=2, num_msa_layers=2, lora_rank=4, lora_alpha=8)


def documents(count: int, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(3, 259, 14).astype(np.int32), 9) for _ in range(count)]


@pytest.mark.parametrize("name", CASES)
def test_training_sees_the_streams_that_decoding_computes(name, tmp_path):
    """Batched training rows and the step model agree; windows lie inside the text."""
    model = make_subject(name, "lossless", tmp_path).stream_model
    document = documents(1)[0]
    with torch.no_grad():
        out = forward(model, make_batch([document], LOSSLESS.num_streams), main=True, early=True)
    step_model = ReferenceStepModel(model, 8, 8, CONTEXT)
    for row, position in enumerate(range(document.prompt_length - 1, len(document.ids) - 1)):
        proposal = step_model.prefill(document.ids[: position + 1].tolist())
        assert relative(proposal.stream_logits, out.streams[0, row].numpy()) < 1e-4
        assert proposal.root == int(out.main[0, row].argmax())


@pytest.mark.parametrize("name", ["opt", "phi3", "gemma2"])
def test_gradients_reach_every_part_and_no_base_weight(name, tmp_path):
    model = build_stream_model(make_base(name, tmp_path), SHARED, seed=0)
    loss, _ = StreamLoss(model)(make_batch(documents(2), SHARED.num_streams))
    loss.backward()
    for path, parameter in model.named_parameters():
        is_ours = path.startswith("parts.") or ".lora_" in path
        assert (parameter.grad is not None) == is_ours, path


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """A shared-mode adapter trained on a base with fused matrices: (base, adapter folder)."""
    folder = tmp_path_factory.mktemp("phi3")
    base = make_base("phi3", folder / "base")
    schedule = AdapterSchedule(epochs=1, tokens_per_batch=64, learning_rate=1e-2)
    fit_adapter(
        base, APP, AdapterSettings(SHARED, schedule), documents(8), documents(2, 1), folder / "tiny"
    )
    return base, folder / "tiny"


def test_lora_of_fused_matrices_is_pefts(phi3):
    base, folder = phi3
    ours = load_stream_model(base, load_adapter(folder))
    theirs, plain = PeftModel.from_pretrained(load_base(base), folder), load_base(base)
    ids = torch.tensor([[1, 9, 8, 7, 6]])
    with torch.no_grad():
        torch.testing.assert_close(ours.base(input_ids=ids).logits, theirs(input_ids=ids).logits)
        assert (theirs(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max() > 1e-3


def test_convert_and_validate_on_every_back_end(phi3, tmp_path, capsys):
    base, folder = phi3
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "longer than the window"}) + "\n")
    sizes = ["--nodes", "6", "--context", str(CONTEXT), "--chunk", "8"]
    arguments = ["--adapter", str(folder), "--base", str(base.path), "--output", str(tmp_path / "out")]
    assert ss_convert([*arguments, *sizes, "--golden-prompts", str(prompts)]) == 0
    capsys.readouterr()
    assert ss_validate([str(tmp_path / "out"), "--json"]) == 0
    report = capsys.readouterr().out
    assert '"mlx"' in report and '"executor"' in report
    # The reference is rebuilt from the bundle's own weights and config.json.
    assert ss_validate([str(tmp_path / "out"), "--json", "--backend", "reference"]) == 0
    assert '"reference"' in capsys.readouterr().out
