"""config.json of every family: what is read, what is refused and by which name."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ss_device.architecture import Architecture
from ss_device.errors import UserError
from ss_device.families import FAMILIES, read_architecture
from ss_device.reference.hugging_face import plain_config
from ss_device.rotary import attention_factor, inverse_frequencies
from tests.families.tiny import CASES, COMMON

SMALL = {**COMMON, "num_attention_heads": 32, "hidden_size": 128, "intermediate_size": 50, "ffn_dim": 50}
REFUSED = [
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
    ("llama", {"hidden_act": "mish"}, "hidden_act"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("qwen3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor"),
    ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("llama", {"attention_dropout": 1e6}, "attention_dropout"),
    ("phi", {"resid_pdrop": -0.1}, "resid_pdrop"),
    ("opt", {"layerdrop": "0.1"}, "layerdrop"),
]


def test_unknown_model_type_lists_the_supported_ones():
    with pytest.raises(UserError) as error:
        read_architecture({"model_type": "mamba"})
    assert all(name in str(error.value) for name in ("mamba", *FAMILIES))


@pytest.mark.parametrize(("family", "settings", "name"), REFUSED)
def test_a_setting_that_is_not_covered_is_named(family, settings, name):
    with pytest.raises(UserError, match=name):
        read_architecture({**SMALL, "model_type": family, **settings})
    assert read_architecture({**SMALL, "model_type": family}).family == family


LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHER = {"architectures": ["X"], "return_dict": False, "num_labels": 7, "use_cache": False, "max_length": 5}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "mlp_bias": True, "head_dim": 8}),
        ("mistral", {"sliding_window": 16, "rope_theta": 1e6, "tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("phi", {"partial_rotary_factor": 0.5, "rope_theta": 5e3}),
        ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 64, "sliding_window": 32}),
        ("opt", {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True}),
        ("gemma2", {"query_pre_attn_scalar": 100, "sliding_window": 16}),
        ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 1e4, "rope_theta": 1e6}),
        ("gemma3_text", {"_sliding_window_pattern": 3, "sliding_window": 16}),
    ],
)
def test_transformers_gets_what_shapes_the_model_and_no_more(family, settings, tmp_path):
    """Its own reader makes the same config of a file without the entries that are left out."""
    path = tmp_path / "config.json"
    raw = {**COMMON, "num_attention_heads": 8, "hidden_size": 128, "model_type": family, **settings}
    raw |= {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4}
    raw |= {"ffn_dim": 50} if family == "opt" else {"intermediate_size": 50}
    path.write_text(json.dumps(raw))
    wanted = AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""}
    path.write_text(json.dumps(raw | OTHER))
    assert plain_config(tmp_path).to_dict() | {"_name_or_path": ""} == wanted


def test_a_missing_size_is_named():
    with pytest.raises(UserError, match="num_attention_heads"):
        read_architecture({"model_type": "llama", "vocab_size": 7, "hidden_size": 8})


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_hugging_faces(family):
    """A config.json that names nothing but sizes means what Hugging Face takes it for."""
    config = AutoConfig.for_model(family, **SMALL)
    found = read_architecture({**SMALL, "model_type": family})
    head = getattr(config, "head_dim", None) or SMALL["hidden_size"] // SMALL["num_attention_heads"]
    assert found.head_dim == head
    assert found.num_kv_heads == (getattr(config, "num_key_value_heads", None) or found.num_heads)
    assert found.tied_head == config.tie_word_embeddings
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        types = ["sliding_attention" if window else "full_attention"] * SMALL["num_hidden_layers"]
    wanted = [window if kind == "sliding_attention" else None for kind in types]
    assert [found.window(layer) for layer in range(found.num_layers)] == wanted
    eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_eps", 1e-5)
    assert found.norm_eps == eps
    assert found.logit_softcap == getattr(config, "final_logit_softcapping", None)
    if hasattr(config, "query_pre_attn_scalar"):
        assert found.attention_scale == config.query_pre_attn_scalar**-0.5


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_hugging_faces(name):
    """Both sides of LongRoPE's limit, scaled and local layers."""
    case = CASES[name]
    config = AutoConfig.for_model(case.model_type, **{**COMMON, **case.settings})
    found = read_architecture(json.loads(config.to_json_string(use_diff=False)))
    if not found.rotated:
        assert found.positions == "learned"
        return
    for window in found.distinct_windows:
        kind = "full_attention" if window is None else "sliding_attention"
        nested = "full_attention" in config.rope_parameters
        parameters = config.rope_parameters[kind] if nested else config.rope_parameters
        for context in (4, 100):
            wanted, factor = _hugging_face(config, parameters, kind if nested else None, found, context)
            np.testing.assert_allclose(inverse_frequencies(found, window, context), wanted, rtol=1e-6)
            assert attention_factor(found, window) == pytest.approx(factor)


def _hugging_face(config, parameters, layer_type, found, context):
    kind = parameters["rope_type"]
    if kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            config, None, seq_len=context, layer_type=layer_type
        )
        return frequencies.numpy(), factor
    exponents = np.arange(0, found.rotated, 2) / found.rotated
    return parameters["rope_theta"] ** -exponents, 1.0


@pytest.mark.parametrize("name", CASES)
def test_architecture_survives_json(name):
    case = CASES[name]
    config = AutoConfig.for_model(case.model_type, **{**COMMON, **case.settings})
    found = read_architecture(json.loads(config.to_json_string(use_diff=False)))
    assert Architecture.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_an_architecture_of_an_older_bundle_still_loads():
    """Manifests written before the families came lack most settings."""
    names = [f.name for f in dataclasses.fields(Architecture)][:15]
    full = read_architecture({**SMALL, "model_type": "llama"}).to_dict()
    old = Architecture.from_dict({name: full[name] for name in names})
    assert old == read_architecture({**SMALL, "model_type": "llama"})
    with pytest.raises(UserError, match="novelty"):
        Architecture.from_dict({**full, "novelty": 1})
