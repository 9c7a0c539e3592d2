"""Entries that libraries know in the files that they read: a damaged file of ours seldom has one by chance.

A tokenizer or a LoRA may hold regular expressions that take all time or memory; nothing bounds those
(docs/robustness.md), and none is here.
"""

from __future__ import annotations

import json
from random import Random

HUGE = 10**9

CONFIG = [
    {"return_dict": False}, {"output_attentions": True}, {"output_hidden_states": True},
    {"torchscript": True}, {"use_cache": "x"}, {"chunk_size_feed_forward": 5},
    {"is_encoder_decoder": True}, {"add_cross_attention": True}, {"pruned_heads": {"0": [0]}},
    {"dtype": "float8"}, {"dtype": 5}, {"torch_dtype": "nonsense"},
    {"_attn_implementation": "flash_attention_2"}, {"attn_implementation": "flex_attention"},
    {"attn_implementation": {"": "eager"}}, {"quantization_config": {"quant_method": "gptq"}},
    {"tp_plan": 3}, {"id2label": 3}, {"num_labels": HUGE}, {"num_labels": -1}, {"architectures": 3},
    {"transformers_version": 5}, {"max_length": 0}, {"temperature": 0}, {"num_beams": 5},
    {"repetition_penalty": -3}, {"min_length": 100000}, {"forced_eos_token_id": HUGE},
    {"suppress_tokens": [HUGE]}, {"bad_words_ids": [[HUGE]]}, {"pad_token_id": HUGE},
    {"pad_token_id": -5}, {"pad_token_id": "x"}, {"sep_token_id": 10**12},
    {"decoder_start_token_id": "x"}, {"bos_token_id": [1]}, {"pretraining_tp": 0},
    {"initializer_range": -1}, {"head_dim": 3}, {"attention_dropout": 1e6}, {"attention_dropout": None},
    {"rope_parameters": {"rope_type": "linear", "factor": 0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2}}, {"rope_theta": 0}, {"rope_theta": 1e300},
    {"rms_norm_eps": -1}, {"rms_norm_eps": 1e300}, {"tokenizer_class": 5}, {"auto_map": 5},
    {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}, {"model_file": "evil.py"},
    {"text_config": {}}, {"text_config": 5}, {"cache_implementation": "zz"}, {"layer_types": 5},
    {"sliding_window": -1}, {"_name_or_path": 5}, {"attribute_map": {"hidden_size": "vocab_size"}},
    {"sub_configs": {"a": 5}}, {"to_dict": 5}, {"__class__": "x"}, {"loss_type": "zz"},
    {"get_text_config": 3}, {"hidden_act": ["silu"]}, {"max_position_embeddings": 1},
    {"max_position_embeddings": HUGE}, {"tie_word_embeddings": "false"}, {"num_key_value_heads": 0},
]  # fmt: skip
LORA = [
    {"lora_dropout": 1e6}, {"use_dora": True}, {"bias": "all"}, {"bias": "zz"},
    {"modules_to_save": ["lm_head"]}, {"modules_to_save": 5}, {"target_modules": "["},
    {"target_modules": None}, {"target_modules": []}, {"target_modules": "all-linear"},
    {"rank_pattern": {"(": 4}}, {"rank_pattern": {".*": HUGE}}, {"alpha_pattern": {".*": "x"}},
    {"layers_to_transform": HUGE}, {"layers_to_transform": "x"}, {"layers_pattern": "["},
    {"init_lora_weights": "pissa"}, {"init_lora_weights": "loftq"}, {"init_lora_weights": "eva"},
    {"auto_mapping": {"base_model_class": "Evil", "parent_library": "os"}}, {"megatron_config": {"a": 1}},
    {"megatron_core": "os"}, {"task_type": "SEQ_CLS"}, {"task_type": None},
    {"peft_type": "PREFIX_TUNING"}, {"peft_type": "zz"}, {"use_rslora": True},
    {"trainable_token_indices": [HUGE]}, {"layer_replication": [[0, 10**6]]},
    {"target_parameters": ["x"]}, {"exclude_modules": "["}, {"r": 0}, {"r": HUGE}, {"r": -1}, {"r": 2.5},
    {"lora_alpha": "x"}, {"fan_in_fan_out": True}, {"base_model_name_or_path": "a/b"},
    {"base_model_name_or_path": 5}, {"runtime_config": 5}, {"eva_config": {"a": 1}},
    {"loftq_config": {"loftq_bits": 3}}, {"lora_bias": True}, {"alora_invocation_tokens": [1]},
    {"qalora_group_size": 0, "use_qalora": True},
]  # fmt: skip
GENERATION = [
    {"temperature": -1}, {"do_sample": "x"}, {"num_beams": 0}, {"max_length": -1},
    {"max_new_tokens": HUGE}, {"cache_implementation": "zz"}, {"watermarking_config": 5},
    {"compile_config": 5}, {"transformers_version": 5}, {"eos_token_id": "x"}, {"pad_token_id": HUGE},
    {"stop_strings": [""]}, {"prompt_lookup_num_tokens": 5}, {"custom_generate": "evil"}, {"to_dict": 5},
    {"validate": 5},
]  # fmt: skip
TOKENIZER_CONFIG = [
    {"model_max_length": -1}, {"extra_special_tokens": 5}, {"extra_special_tokens": {"a": "b"}},
    {"added_tokens_decoder": {"1000000000": {"content": "x"}}}, {"added_tokens_decoder": {"x": 5}},
    {"tokenizer_class": "Evil"}, {"tokenizer_class": "LlamaTokenizer"}, {"chat_template": ""},
    {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"},
    {"chat_template": "{{ 'x' * 10**10 }}"}, {"chat_template": "{{ raise_exception('no') }}"},
    {"chat_template": "{{ ''.__class__.__mro__ }}"}, {"chat_template": [5]},
    {"chat_template": {"a": "b"}}, {"chat_template": "{% include '/etc/passwd' %}"},
    {"chat_template": "{{ messages[9].content }}"}, {"bos_token": {"__type": "AddedToken", "content": 5}},
    {"eos_token": {"content": "zz"}}, {"unk_token": [1]}, {"padding_side": "zz"},
    {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, {"tokenizer_file": "/etc/passwd"},
    {"vocab_file": "/dev/zero"}, {"backend": "zz"}, {"special_tokens_map_file": "/dev/zero"},
    {"model_input_names": 5}, {"split_special_tokens": True},
]  # fmt: skip


def _padding(strategy: object, multiple: int | None = None) -> dict:
    ends = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    return {"padding": {"strategy": strategy, "pad_to_multiple_of": multiple, **ends}}


def _truncation(strategy: str, length: int, stride: int) -> dict:
    rule = {"direction": "Right", "max_length": length, "strategy": strategy, "stride": stride}
    return {"truncation": rule}


def _bpe(**settings) -> dict:
    none = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], **none, **flags, **settings}}


def _replace(kind: str, pattern: dict, content: str) -> dict:
    return {kind: {"type": "Replace", "pattern": pattern, "content": content}}


def _added(**settings) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [{"id": 5, "content": "zz", "special": True, **flags, **settings}]}


TOKENIZER = [
    _padding({"Fixed": 10**12}), _padding({"Fixed": 10**7}), _padding("BatchLongest", 10**12),
    _padding("BatchLongest", 0), _truncation("LongestFirst", 0, 0), _truncation("LongestFirst", 1, 1),
    _truncation("OnlySecond", 2, 5), _bpe(), _bpe(dropout=1.0), _bpe(unk_token="q", fuse_unk=True),
    _bpe(vocab={"a": 2**32 - 1, "b": 7}), _bpe(vocab={}), _replace("normalizer", {"Regex": "["}, "x"),
    _replace("normalizer", {"Regex": ""}, "x" * 999), _replace("decoder", {"String": ""}, "x"),
    {"normalizer": {"type": "Prepend", "prepend": "z" * 10**6}}, {"pre_tokenizer": None},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Removed", "invert": True}},
    {"post_processor": None}, {"decoder": None}, {"version": "9"},
    {"decoder": {"type": "Strip", "content": "a", "start": HUGE, "stop": HUGE}},
    {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "zz"}},
    {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}},
    {"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]], "byte_fallback": False}},
    {"added_tokens": []}, _added(id=2**32 - 1), _added(content=""), _added(content="e", normalized=True),
]  # fmt: skip

SETTINGS = {
    "config.json": CONFIG,
    "adapter_config.json": LORA,
    "generation_config.json": GENERATION,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "tokenizer.json": TOKENIZER,
}
"""By file name, entries one of which is set."""


def set_library_setting(name: str, text: bytes, rng: Random) -> tuple[bytes, str]:
    """The JSON text of file `name` with an entry of SETTINGS, and which."""
    entry = rng.choice(SETTINGS[name])
    return json.dumps(json.loads(text) | entry).encode(), f"{json.dumps(entry):.200}"
