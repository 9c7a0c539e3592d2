"""Speculative streams on a Hugging Face model's own layers: the reference for every back end.

Main rows are ordinary token positions; each may carry γ stream rows. No (L(1+γ))² mask is needed: over
main keys a stream has its position's own mask row, and streams of one position see each other through a
γ×γ lower triangle (METHOD: Streams, Training).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.reference.stream_parameters import StreamParameters

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """What flows through the layers.

    main [B, T, h]; positions [B, T]; mask bool [B, T, S], S = cached keys followed by the T rows;
    streams [B, P, γ, h] of the main rows `stream_rows` [B, P] (T marks a padding entry), or None.
    """

    main: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    streams: torch.Tensor | None = None
    stream_rows: torch.Tensor | None = None


class StreamModel(nn.Module):
    """A causal LM with streams. `base` stays what it was; all added parts live in `parts`."""

    def __init__(self, base: nn.Module, architecture: Architecture, config: SpeculativeConfig) -> None:
        super().__init__()
        config.check(architecture)
        self.base = base
        self.architecture = architecture
        self.config = config
        self.parts = StreamParameters(config, architecture)

    @property
    def decoder(self) -> nn.Module:
        """The Hugging Face decoder (embedding, layers, final norm), with or without PEFT around."""
        return _causal_lm(self.base).model

    @property
    def first_msa_layer(self) -> int:
        return self.architecture.num_layers - self.config.num_msa_layers

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] → hidden states [B, T, h]."""
        return self.decoder.embed_tokens(tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head. [..., h] → [..., V]."""
        return _causal_lm(self.base).lm_head(self.decoder.norm(hidden))

    def early_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The pruning head's next-token logits of states at the first MSA layer's input.

        z̃ = H(norm_f(M + B·A·M)) (METHOD: Training). [..., h] → [..., V].
        """
        return self.logits(self.parts.pruning(hidden) if self.config.pruning_rank else hidden)

    def start_streams(self, rows: Rows, stream_rows: torch.Tensor) -> Rows:
        """Attach γ streams to the main rows `stream_rows` [B, P]: S[i,j] = f_η(M[i]) + P[j]."""
        padded = functional.pad(rows.main, (0, 0, 0, 1))
        start = torch.take_along_dim(padded, stream_rows[..., None], dim=1)
        if self.config.stream_init_rank:
            start = start + self.parts.stream_init(start)
        streams = start[:, :, None, :] + self.parts.stream_embeddings
        return replace(rows, streams=streams, stream_rows=stream_rows)

    def layer(self, index: int, rows: Rows, past: KeysValues | None) -> tuple[Rows, KeysValues]:
        """One decoder layer over main rows and, if attached, streams.

        past: keys and values [B, n_kv, n, head_dim] of the committed prefix. Returns the new rows and
        the keys and values of the T main rows alone; streams are never cached.
        """
        block = self.decoder.layers[index]
        msa = index - self.first_msa_layer
        attended, attended_streams, new = self._attention(block, msa, rows, past)
        main = rows.main + attended
        main = main + block.mlp(block.post_attention_layernorm(main))
        streams = rows.streams
        if streams is not None:
            streams = streams + attended_streams
            streams = streams + self._stream_mlp(block, msa, block.post_attention_layernorm(streams))
        return replace(rows, main=main, streams=streams), new

    def _attention(self, block, msa, rows, past):
        attention = block.self_attn
        q, k, v = self._project(block, rows.main, rows.positions, None)
        keys, values = (
            (k, v) if past is None else (torch.cat([p, n], 2) for p, n in zip(past, (k, v), strict=True))
        )
        scores = self._scores(q, keys).masked_fill(~rows.mask[:, None, None], -math.inf)
        if rows.streams is None:
            out = self._mix(scores.softmax(-1), values)
            return attention.o_proj(_join_heads(out)), None, (k, v)
        sq, sk, sv = self._project_streams(block, msa, rows)
        out_streams = self._stream_attention(rows, sq, sk, sv, keys, values)
        if self.config.main_attends_streams:
            out = self._main_with_streams(rows, q, scores, values, sk, sv)
        else:
            out = self._mix(scores.softmax(-1), values)
        joined = _join_heads(out_streams.flatten(2, 3)).unflatten(1, rows.streams.shape[1:3])
        projected = self._linear(attention.o_proj, msa, "o", joined)
        return attention.o_proj(_join_heads(out)), projected, (k, v)

    def _project(self, block, hidden, positions, msa):
        """Normed and rotated q [B, H, T, D], k and v [B, n_kv, T, D]; msa None marks main rows."""
        attention, x = block.self_attn, block.input_layernorm(hidden)
        d = self.architecture.head_dim
        q, k, v = (
            self._linear(module, msa, name, x).unflatten(-1, (-1, d)).transpose(1, 2)
            for module, name in (
                (attention.q_proj, "q"),
                (attention.k_proj, "k"),
                (attention.v_proj, "v"),
            )
        )
        cos, sin = self.decoder.rotary_emb(v, positions)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v

    def _project_streams(self, block, msa, rows):
        """q [B, H, P, γ, D], k and v [B, n_kv, P, γ, D] of the streams at their own positions."""
        count, gamma = rows.streams.shape[1:3]
        padded = functional.pad(rows.positions, (0, 1))
        positions = torch.take_along_dim(padded, rows.stream_rows, dim=1)[..., None]
        steps = torch.arange(1, gamma + 1, device=positions.device)
        shift = steps if self.config.stream_position == "shift" else torch.zeros_like(steps)
        flat = self._project(block, rows.streams.flatten(1, 2), (positions + shift).flatten(1), msa)
        return tuple(t.unflatten(2, (count, gamma)) for t in flat)

    def _stream_attention(self, rows, q, k, v, keys, values):
        """Stream (i, j) over main keys visible to i and streams (i, j' ≤ j). → [B, H, P, γ, D]."""
        gamma = q.shape[3]
        over_main = self._scores(q.flatten(2, 3), keys).unflatten(3, q.shape[2:4])
        padded = functional.pad(rows.mask, (0, 0, 0, 1))
        visible = torch.take_along_dim(padded, rows.stream_rows[..., None], dim=1)
        over_main = over_main.masked_fill(~visible[:, None, None, :, None], -math.inf)
        grouped = q.unflatten(1, (k.shape[1], -1)) / math.sqrt(q.shape[-1])
        own = torch.einsum("bkgpid,bkpjd->bkgpij", grouped, k)
        later = torch.ones(gamma, gamma, dtype=torch.bool, device=q.device).triu(1)
        own = own.masked_fill(later, -math.inf)
        weights = torch.cat([over_main, own], -1).softmax(-1)
        over_main, own = weights.split([keys.shape[2], gamma], -1)
        out = torch.einsum("bkgpis,bksd->bkgpid", over_main, values)
        return (out + torch.einsum("bkgpij,bkpjd->bkgpid", own, v)).flatten(1, 2)

    def _main_with_streams(self, rows, q, scores, values, k, v):
        """v2's shared attention (Eq. 3): rows that carry streams also attend to their own γ streams."""
        batch, _, length, d = q.shape
        kv, count, gamma = k.shape[1], k.shape[2], k.shape[3]
        index = rows.stream_rows[:, None, :, None, None].expand(batch, kv, count, gamma, d)
        # One spare row takes the padding entries, which must not touch a real row.
        own_k = q.new_zeros(batch, kv, length + 1, gamma, d).scatter(2, index, k)[:, :, :length]
        own_v = q.new_zeros(batch, kv, length + 1, gamma, d).scatter(2, index, v)[:, :, :length]
        carries = torch.zeros(batch, length + 1, dtype=torch.bool, device=q.device)
        carries = carries.scatter(1, rows.stream_rows, True)[:, None, None, :length, None]
        grouped = q.unflatten(1, (kv, -1)) / math.sqrt(d)
        own = torch.einsum("bkgtd,bktjd->bkgtj", grouped, own_k).masked_fill(~carries, -math.inf)
        weights = torch.cat([scores, own], -1).softmax(-1)
        over_main, own = weights.split([scores.shape[-1], gamma], -1)
        extra = torch.einsum("bkgtj,bktjd->bkgtd", own, own_v)
        return self._mix(over_main, values) + extra.flatten(1, 2)

    def _stream_mlp(self, block, msa, x):
        """Feed-forward of stream rows: the low-rank adapter in place of the MLP, or beside it."""
        out = 0
        if self.config.stream_mlp == "base":
            mlp = block.mlp
            gate = mlp.act_fn(self._linear(mlp.gate_proj, msa, "gate", x))
            out = self._linear(mlp.down_proj, msa, "down", gate * self._linear(mlp.up_proj, msa, "up", x))
        if self.config.stream_adapter_rank:
            out = out + self.parts.stream_adapters[msa](x)
        return out

    def _linear(self, module, msa, name, x):
        """A projection; on stream rows (msa not None) plus the stream LoRA."""
        out = module(x)
        if msa is not None and self.config.stream_lora_rank:
            out = out + self.parts.stream_lora[msa][name](x)
        return out

    def _scores(self, q, keys):
        """[B, H, T, D] × [B, n_kv, S, D] → scaled scores [B, n_kv, groups, T, S]."""
        grouped = q.unflatten(1, (keys.shape[1], -1)) / math.sqrt(q.shape[-1])
        return torch.einsum("bkgtd,bksd->bkgts", grouped, keys)

    def _mix(self, weights, values):
        return torch.einsum("bkgts,bksd->bkgtd", weights, values).flatten(1, 2)


def _join_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] → [B, T, H·D]."""
    return x.transpose(1, 2).flatten(2)


def _causal_lm(model: nn.Module) -> nn.Module:
    """The Hugging Face causal LM inside a PEFT wrapper, or the model itself."""
    return model.base_model.model if hasattr(model, "peft_config") else model


def load_base(base: BaseFolder, dtype: str = "float32") -> nn.Module:
    """The base as a Hugging Face model in evaluation mode, every parameter frozen."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=getattr(torch, dtype))
    return model.eval().requires_grad_(False)


def add_lora(model: nn.Module, config: SpeculativeConfig) -> nn.Module:
    """Wrap `model` with PEFT LoRA of the shared mode on all projections; the base stays frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=list(LORA_MODULES),
            task_type="CAUSAL_LM",
        ),
    )


def load_stream_model(base: BaseFolder, adapter: Adapter, dtype: str = "float32") -> StreamModel:
    """Base and adapter as one model in evaluation mode. Raises UserError when they do not fit."""
    adapter.check_base(base)
    return attach_adapter(load_base(base, dtype), base.architecture, adapter)


def attach_adapter(model: nn.Module, architecture: Architecture, adapter: Adapter) -> StreamModel:
    """A StreamModel from a loaded Hugging Face model and an adapter in memory."""
    dtype = next(model.parameters()).dtype
    if adapter.config.lora_rank:
        model = add_lora(model, adapter.config)
        _copy_lora(model, adapter)
    stream_model = StreamModel(model, architecture, adapter.config)
    stream_model.parts.from_numpy(adapter.tensors)
    return stream_model.to(dtype).eval().requires_grad_(False)


def _copy_lora(model: nn.Module, adapter: Adapter) -> None:
    from ss_device.families import canonical_name

    for name, module in _causal_lm(model).named_modules():
        if not hasattr(module, "lora_A"):
            continue
        key = canonical_name("llama", name + ".weight").removesuffix(".weight")
        a, b = adapter.lora[key]
        with torch.no_grad():
            module.lora_A["default"].weight.copy_(torch.from_numpy(a))
            module.lora_B["default"].weight.copy_(torch.from_numpy(b))
