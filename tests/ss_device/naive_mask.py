"""The loss with one (L(1+γ))² mask over main and stream rows, written down from docs/method.md, Training.

Shares no code with the product's attention, batches or losses: one document, Hugging Face's own layer
modules, dense masks, plain loops. Memory grows with the square of L(1+γ); for comparison only.
"""

from __future__ import annotations

import torch


def rotate(x, positions, theta):
    """Rotary embedding of x [heads, rows, d], halves rotated against each other."""
    d = x.shape[-1]
    angles = positions[:, None] * theta ** (-torch.arange(0, d, 2) / d)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def visibility(length, owners, depths, main_attends_streams):
    """bool [R, R] over rows [main 0…L-1 | streams]: owners, depths [S] say whose stream each is."""
    position = torch.cat([torch.arange(length), owners])
    depth = torch.cat([torch.zeros(length, dtype=torch.long), depths])
    seen_main = (depth[None] == 0) & (position[None] <= position[:, None])
    same = position[None] == position[:, None]
    seen_stream = (depth[None] > 0) & same & (depth[:, None] > 0) & (depth[None] <= depth[:, None])
    mask = seen_main | seen_stream
    if main_attends_streams:
        mask |= (depth[:, None] == 0) & (depth[None] > 0) & same
    return mask


def naive_loss(model, ids, prompt_length):
    """Σ_j mean CE of the streams, mean CE of main and of the early exit of one document's completion.

    Returns (streams [γ], main, early); gradients flow to everything trainable.
    """
    config, parts = model.config, model.parts
    gamma, length = config.num_streams, len(ids)
    decoder, first = causal_lm(model).model, model.first_msa_layer
    carrying = torch.arange(prompt_length - 1, length - 1)
    owners = carrying.repeat_interleave(gamma)
    depths = torch.arange(1, gamma + 1).repeat(len(carrying))
    hidden = decoder.embed_tokens(ids)
    positions = torch.arange(length)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    is_stream = torch.zeros(length, dtype=torch.bool)
    for index, block in enumerate(decoder.layers):
        if index == first:
            early = head(model, at_exit(parts, hidden[carrying].detach()))
            streams = hidden[owners] + parts.stream_embeddings[depths - 1]
            hidden = torch.cat([hidden, streams])
            positions = torch.cat([positions, owners + depths])
            mask = visibility(length, owners, depths, config.main_attends_streams)
            is_stream = torch.arange(len(hidden)) >= length
        hidden = hidden + attention(model, block, index - first, hidden, positions, mask, is_stream)
        hidden = hidden + feed_forward(model, block, index - first, hidden, is_stream)
    logits = head(model, hidden)
    by_depth = []
    for j in range(1, gamma + 1):
        usable = carrying[carrying + 1 + j < length]
        rows = length + (usable - carrying[0]) * gamma + j - 1
        scores = logits[rows]
        if config.bigram_rank:
            scores = scores + parts.bigram.u[ids[usable + j]] @ parts.bigram.v.T
        by_depth.append(torch.nn.functional.cross_entropy(scores, ids[usable + 1 + j]))
    wanted = ids[carrying + 1]
    cross_entropy = torch.nn.functional.cross_entropy
    return torch.stack(by_depth), cross_entropy(logits[carrying], wanted), cross_entropy(early, wanted)


def at_exit(parts, hidden):
    return hidden + hidden @ parts.pruning.a.T @ parts.pruning.b.T


def head(model, hidden):
    base = causal_lm(model)
    return base.lm_head(base.model.norm(hidden))


def causal_lm(model):
    return model.base.base_model.model if hasattr(model.base, "peft_config") else model.base


def projected(model, module, msa, name, x, is_stream):
    out = module(x)
    if msa >= 0 and model.config.stream_lora_rank:
        lora = model.parts.stream_lora[msa][name]
        out = out + is_stream[:, None] * (lora.scale * (x @ lora.a.T @ lora.b.T))
    return out


def attention(model, block, msa, hidden, positions, mask, is_stream):
    sizes, x = model.architecture, block.input_layernorm(hidden)
    own, d = block.self_attn, model.architecture.head_dim
    q, k, v = (
        projected(model, module, msa, name, x, is_stream).unflatten(-1, (-1, d)).transpose(0, 1)
        for module, name in ((own.q_proj, "q"), (own.k_proj, "k"), (own.v_proj, "v"))
    )
    q, k = (rotate(t, positions, sizes.rope_theta) for t in (q, k))
    repeats = sizes.num_heads // sizes.num_kv_heads
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = (q @ k.transpose(1, 2) / d**0.5).masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return projected(model, own.o_proj, msa, "o", out, is_stream)


def feed_forward(model, block, msa, hidden, is_stream):
    x, mlp = block.post_attention_layernorm(hidden), block.mlp
    gate = torch.nn.functional.silu(projected(model, mlp.gate_proj, msa, "gate", x, is_stream))
    up = projected(model, mlp.up_proj, msa, "up", x, is_stream)
    out = projected(model, mlp.down_proj, msa, "down", gate * up, is_stream)
    if msa >= 0 and model.config.stream_adapter_rank:
        adapter = model.parts.stream_adapters[msa]
        extra = x @ adapter.down.T @ adapter.up.T
        kept = out if model.config.stream_mlp == "base" else torch.zeros_like(out)
        out = torch.where(is_stream[:, None], kept + extra, out)
    return out
