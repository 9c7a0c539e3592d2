"""Initial weights that already copy: a previous-token head and induction heads, wired by hand.

A small model spends most of a small token budget on discovering that "A B … A" is followed by "B". Here
that circuit is the starting point (Olsson et al. 2022 describe it in trained models): layer 0 writes the
previous token's identity beside the current one; in layers 1 and 2 a query with the current token finds
the position whose *previous* token it is and moves that position's token into the output direction.
Everything stays an ordinary, trainable Llama weight.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

EMBEDDING_STD = 0.04
CONSTANT_DIM = 0  # one hidden dimension that is the same for every token: heads by position read it
CONSTANT = 0.32
MATCH, MOVE = 2.0, 0.5  # sharpness of the match, size of the moved token beside the residual
FAST, SLOW = range(0, 8), range(14, 32)  # rotary pairs that tell neighbours apart / carry content


def wire_copying(model: LlamaForCausalLM, seed: int) -> None:
    """Overwrite some initial weights of a freshly built Llama (head_dim 64, at least 3 layers)."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    h, d = config.hidden_size, config.head_dim
    directions = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q
    directions[:, CONSTANT_DIM] = 0.0
    subspaces = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q.T
    with torch.no_grad():
        _embeddings(model, generator)
        _quiet_residual_writes(model)
        for kv in range(config.num_key_value_heads):
            block = directions[kv * d : (kv + 1) * d]
            _previous_token_head(model, kv, block, subspaces[kv * d : (kv + 1) * d])
        blocks = iter(directions.split(d))
        for layer in (1, 2):
            for kv in range(config.num_key_value_heads):
                identity = directions[kv * d : (kv + 1) * d]
                _induction_head(model, layer, kv, identity, subspaces[kv * d : (kv + 1) * d], next(blocks))


def _embeddings(model, generator) -> None:
    weight = model.model.embed_tokens.weight
    weight.normal_(0.0, EMBEDDING_STD, generator=generator)
    weight[:, CONSTANT_DIM] = CONSTANT


def _quiet_residual_writes(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.15)
        layer.mlp.down_proj.weight.mul_(0.25)


def _previous_token_head(model, kv: int, read: torch.Tensor, write: torch.Tensor) -> None:
    """Layer 0: attend to position i-1 by rotary phase, write `read`'s projection along `write`."""
    config, attention = model.config, model.model.layers[0].self_attn
    d, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    frequency = torch.tensor([theta ** (-2 * pair / d) for pair in FAST])
    strength = 0.9
    query, key = torch.zeros(d), torch.zeros(d)
    query[list(FAST)] = strength
    key[list(FAST)] = strength * torch.cos(frequency)
    key[[pair + d // 2 for pair in FAST]] = strength * torch.sin(frequency)
    rows, head = slice(kv * d, (kv + 1) * d), kv * group
    attention.q_proj.weight[head * d : (head + 1) * d] = 0.0
    attention.q_proj.weight[head * d : (head + 1) * d, CONSTANT_DIM] = query
    attention.k_proj.weight[rows] = 0.0
    attention.k_proj.weight[rows, CONSTANT_DIM] = key
    attention.v_proj.weight[rows] = read
    attention.o_proj.weight[:, head * d : (head + 1) * d] = 0.09 * write.T


def _induction_head(model, layer: int, kv: int, identity, previous, moved) -> None:
    """Attend where the previous token equals the current one; move that position's token onward."""
    config, attention = model.config, model.model.layers[layer].self_attn
    d, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    pairs = list(SLOW) + [pair + d // 2 for pair in SLOW]
    offset = 0 if layer == 1 else d - len(pairs)
    rows, head = slice(kv * d, (kv + 1) * d), kv * group
    query, key = torch.zeros(d, config.hidden_size), torch.zeros(d, config.hidden_size)
    query[pairs] = MATCH * identity[offset : offset + len(pairs)]
    key[pairs] = MATCH * previous[offset : offset + len(pairs)]
    attention.q_proj.weight[head * d : (head + 1) * d] = query
    attention.k_proj.weight[rows] = key
    attention.v_proj.weight[rows] = moved
    attention.o_proj.weight[:, head * d : (head + 1) * d] = MOVE * moved.T
