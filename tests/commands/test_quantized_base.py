"""A checkpoint that mlx-lm quantized, from ss-convert to the text that ss-generate writes."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model, quantize_model, save_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.checkpoint_weights import stored_tensors
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.settings import RuntimeSettings
from ss_runtime.tokenization import load_tokenizer
from tests.commands.conftest import CONFIG, PROMPTS, SIZES
from tests.tiny_models import make_tiny_base, random_adapter, write_byte_tokenizer

FORMATS = {"4": (64, 4, "affine"), "8": (64, 8, "affine"), "mxfp4": (32, 4, "mxfp4")}
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny base in bfloat16, an adapter trained on it, and its copies as mlx-lm quantizes them."""
    folder = tmp_path_factory.mktemp("quantized")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    base = make_tiny_base(folder / "base", dtype="bfloat16", **sizes)
    save_adapter(random_adapter(base, CONFIG), base.architecture, folder / "adapter")
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS)
    (folder / "adapter" / "golden_prompts.jsonl").write_text(rows)
    for name, (group_size, bits, mode) in FORMATS.items():
        model, config = load_model(base.path)
        model, config = quantize_model(model, config, group_size=group_size, bits=bits, mode=mode)
        save_model(folder / name, model)
        (folder / name / "config.json").write_text(json.dumps(config))
        write_byte_tokenizer(folder / name)
    return folder


@pytest.fixture(scope="module", params=FORMATS)
def converted(request, models):
    """Name of a weight format, the folder of bases, and the bundle made from the quantized base."""
    output = models / f"bundle-{request.param}"
    arguments = ["--adapter", models / "adapter", "--base", models / request.param, "--target", "mlx"]
    assert ss_convert([*map(str, arguments), "--output", str(output), *SIZES]) == 0
    return request.param, models, output


def dequantized_by_mlx(folder, weight_format):
    """The original base in Hugging Face with the weights of a copy as MLX dequantizes them, in float32."""
    group_size, bits, mode = FORMATS[weight_format]
    stored = dict(mx.load(str(folder / weight_format / "model.safetensors")))
    tensors = {}
    for name in load_file(folder / "base" / "model.safetensors"):
        value, module = stored[name], name.removesuffix(".weight")
        if f"{module}.scales" in stored:
            scales, biases = stored[f"{module}.scales"], stored.get(f"{module}.biases")
            scales, biases = (
                t.astype(mx.float32) if t is not None and t.dtype != mx.uint8 else t
                for t in (scales, biases)
            )
            value = mx.dequantize(value, scales, biases, group_size=group_size, bits=bits, mode=mode)
        tensors[name] = torch.from_numpy(np.array(value.astype(mx.float32)))
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    return model.eval()


def test_the_bundle_holds_the_very_bytes(converted):
    weight_format, models, output = converted
    kept = stored_tensors(output / "mlx" / "base.safetensors")
    given = stored_tensors(models / weight_format / "model.safetensors")
    assert {t.dtype for t in kept.values()} >= {"U32", "BF16"}
    assert sorted(t.raw().tobytes() for t in kept.values()) == sorted(
        t.raw().tobytes() for t in given.values()
    )


@pytest.mark.parametrize("backend", ["mlx", "reference"])
def test_text_is_that_of_the_dequantized_weights(converted, capsys, backend):
    weight_format, models, output = converted
    model = dequantized_by_mlx(models, weight_format)
    for prompt in PROMPTS:
        capsys.readouterr()
        arguments = ["--bundle", str(output), "--backend", backend, "--dtype", "float32", "--json"]
        tokens = ["--max-tokens", str(MAX_TOKENS), "--prompt", prompt]
        assert ss_generate([*arguments, *tokens]) == 0
        found = json.loads(capsys.readouterr().out)
        ids = torch.tensor([prompt_ids(output, prompt)])
        wanted = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        assert found["token_ids"] == wanted[0, ids.shape[1] :].tolist()


def prompt_ids(bundle, text: str) -> list[int]:
    return load_tokenizer(open_bundle(bundle)).encode(text)


def test_validation_replays_the_golden_traces(converted, capsys):
    _, _, output = converted
    for backend in ("mlx", "reference"):
        assert ss_validate([str(output), "--backend", backend, "--dtype", "float32", "--json"]) == 0
    assert capsys.readouterr().out


def test_the_server_keeps_the_codes(converted):
    _, _, output = converted
    bank = AdapterBank(open_bundle(output), RuntimeSettings(dtype="float16"))
    assert bank.base_bytes < 0.8 * open_base(output.parent / "base").architecture.num_parameters() * 2
    assert bank.activate().model.prefill([5, 6, 7]).root >= 0


def test_a_package_is_made_of_the_values(models, capsys):
    arguments = ["--adapter", models / "adapter", "--base", models / "4", "--output", models / "both"]
    assert ss_convert([*map(str, arguments), *SIZES, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes == ["base '4' is quantized: taken for a copy of 'base', on which 'tiny' was trained"]
    assert ss_validate([str(models / "both"), "--backend", "executor", "--dtype", "float32"]) == 0


def test_another_size_is_refused(models, capsys, tmp_path):
    base = make_tiny_base(tmp_path / "other", hidden_size=32)
    save_adapter(random_adapter(base, CONFIG), base.architecture, tmp_path / "adapter")
    arguments = ["--adapter", tmp_path / "adapter", "--base", models / "4", "--output", tmp_path / "out"]
    assert ss_convert([*map(str, arguments), "--target", "mlx"]) == 2
    assert "shape" in capsys.readouterr().err
