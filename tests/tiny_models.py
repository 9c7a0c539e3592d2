"""Tiny random bases and adapters: every back end is tested on the same ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ss_device.adapter import Adapter
from ss_device.architecture import Architecture, block_of
from ss_device.base_model import BaseFolder, open_base
from ss_device.config import LORA_TARGETS, SpeculativeConfig, tensor_shapes
from ss_device.families import fused_projections, names_of

VOCAB = 300


def make_tiny_base(folder: Path, seed: int = 0, dtype: str = "float32", **changes) -> BaseFolder:
    """Write a random Llama (3 layers, GQA, head_dim 8, byte-level tokenizer) and open it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.35,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return open_base(folder)


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose first ids are special and whose others are single bytes."""
    special = ["<|pad|>", "<|bos|>", "<|eos|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def random_adapter(
    base: BaseFolder, config: SpeculativeConfig, seed: int = 1, app: str = "tiny"
) -> Adapter:
    """An adapter whose every part is non-zero, so that an ignored part changes some output."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config, base.architecture).items():
        scale = 0.5 if name == "stream_embeddings" else 1.0 / np.sqrt(shape[-1])
        tensors[name] = _half(rng.normal(0, scale, shape))
    lora = random_lora(base.architecture, config, rng) if config.lora_rank else {}
    return Adapter(
        app=app,
        config=config,
        base=base.identity,
        tensors=tensors,
        prompt_template="{prompt}",
        max_tokens=24,
        lora=lora,
    )


def random_lora(architecture: Architecture, config: SpeculativeConfig, rng: np.random.Generator) -> dict:
    """LoRA of every projection; those that the base stores as one matrix share their factor a."""
    lora, shapes = {}, architecture.projection_shapes()
    for layer in range(architecture.num_layers):
        for module in names_of(architecture).projections():
            targets = fused_projections(module)
            inputs = shapes[targets[0]][1]
            a = _half(rng.normal(0, inputs**-0.5, (config.lora_rank, inputs)))
            for target in targets:
                assert target in LORA_TARGETS
                spread = 0.2 * config.lora_rank**-0.5
                b = _half(rng.normal(0, spread, (shapes[target][0], config.lora_rank)))
                lora[f"layers.{layer}.{block_of(target)}.{target}"] = (a, b)
    return lora


def _half(array: np.ndarray) -> np.ndarray:
    """float32 values that float16 holds exactly: saving an adapter loses nothing."""
    return array.astype(np.float16).astype(np.float32)


TINY_RECIPE = """
name = "tiny"
seed = 3
[tokenizer]
vocab_size = 300
sample_documents = 10
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 128
[training]
tokens_per_batch = 256
max_length = 96
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.1
[[sources]]
kind = "application"
app = "sqlctx"
path = "rows.jsonl"
weight = 1.0
"""
