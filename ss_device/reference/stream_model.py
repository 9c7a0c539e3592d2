"""Speculative streams on a Hugging Face model's own layers: the reference for every back end.

Main rows are ordinary token positions; each may carry γ stream rows. No (L(1+γ))² mask is needed: over
main keys a stream has its position's own mask row, and streams of one position see each other through a
γ×γ lower triangle (docs/method.md, Mask rules).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.families import canonical_parts
from ss_device.reference.hugging_face import ACTIVATIONS, Modules, causal_lm, load_base, lora_modules
from ss_device.reference.stream_parameters import StreamParameters

__all__ = ["Rows", "StreamModel", "add_lora", "attach_adapter", "load_base", "load_stream_model"]

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """What flows through the layers.

    main [B, T, h]; positions [B, T]; mask bool [B, T, S], S = cached keys (of positions 0, 1, …), then
    the T rows; streams [B, P, γ, h] of the main rows `stream_rows` [B, P] (T marks a padding entry), or
    None.
    context: the longest text in tokens, which decides LongRoPE's factors (`ss_device.rotary`); None: these
    rows end the text.
    """

    main: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    streams: torch.Tensor | None = None
    stream_rows: torch.Tensor | None = None
    context: int | None = None

    def visible(self, window: int | None) -> torch.Tensor:
        """The mask of layers with this window: keys at positions > p - window (tree nodes by depth)."""
        if window is None:
            return self.mask
        cached = self.mask.shape[-1] - self.positions.shape[-1]
        before = torch.arange(cached, device=self.positions.device).expand(len(self.positions), -1)
        keys = torch.cat([before, self.positions], 1)
        return self.mask & (self.positions[:, :, None] - keys[:, None] < window)


class StreamModel(nn.Module):
    """A causal LM with streams. `base` stays what it was; all added parts live in `parts`.

    `own`: the Hugging Face model's modules by canonical name; what they compute is theirs, how they are
    put together follows the Architecture.
    """

    def __init__(self, base: nn.Module, architecture: Architecture, config: SpeculativeConfig) -> None:
        super().__init__()
        config.check(architecture)
        self.base = base
        self.own = Modules(causal_lm(base), architecture)
        self.architecture = architecture
        self.config = config
        self.parts = StreamParameters(config, architecture)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return next(self.parameters()).device

    @property
    def first_msa_layer(self) -> int:
        return self.architecture.num_layers - self.config.num_msa_layers

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions [B, T] → hidden states [B, T, h]."""
        return self.own.embed(tokens, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm, LM head, soft cap. [..., h] → [..., V]."""
        out = self.own("head")(self.own("norm")(hidden))
        return _soft_cap(out, self.architecture.logit_softcap)

    def early_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The pruning head's next-token logits of states at the first MSA layer's input.

        z̃ = H(norm_f(M + B·A·M)) (docs/method.md, Training). [..., h] → [..., V].
        """
        return self.logits(self.parts.pruning(hidden) if self.config.pruning_rank else hidden)

    def start_streams(self, rows: Rows, stream_rows: torch.Tensor) -> Rows:
        """Attach γ streams to the main rows `stream_rows` [B, P]: S[i,j] = f_η(M[i]) + P[j]."""
        padded = functional.pad(rows.main, (0, 0, 0, 1))
        start = torch.take_along_dim(padded, stream_rows[..., None], dim=1)
        if self.config.stream_init_rank:
            start = start + self.parts.stream_init(start)
        if self.config.value_rotation:
            streams = start[:, :, None, :].expand(-1, -1, self.config.num_streams, -1)
        else:
            streams = start[:, :, None, :] + self.parts.stream_embeddings
        if self.architecture.positions == "learned":
            streams = streams + self._position_step(rows, stream_rows)
        return replace(rows, streams=streams, stream_rows=stream_rows)

    def _position_step(self, rows: Rows, stream_rows: torch.Tensor) -> torch.Tensor:
        """Learned positions: what moves a stream from its main row's position to its own, [B, P, γ, h]."""
        here = torch.take_along_dim(functional.pad(rows.positions, (0, 1)), stream_rows, dim=1)
        there = self._stream_positions(rows, stream_rows)
        return (
            self.own.learned(there.flatten(1)).unflatten(1, there.shape[1:])
            - (self.own.learned(here)[:, :, None])
        )

    def layer(self, index: int, rows: Rows, past: KeysValues | None) -> tuple[Rows, KeysValues]:
        """One decoder layer over main rows and, if attached, streams.

        past: keys and values [B, n_kv, n, head_dim] of the committed prefix. Returns the new rows and
        the keys and values of the T main rows alone; streams are never cached. In layers with a window
        a stream sees the main keys that its main row sees.
        """
        masked = replace(rows, mask=rows.visible(self.architecture.window(index)))
        attended, attended_streams, new = self._attention(index, masked, past)
        main = self._add_blocks(index, rows.main, attended, None)
        streams = rows.streams
        if streams is not None:
            streams = self._add_blocks(index, streams, attended_streams, index - self.first_msa_layer)
        return replace(rows, main=main, streams=streams), new

    def _add_blocks(self, index, x, attended, msa):
        """Residual rows x plus attention's output, plus the feed-forward block. msa None: main rows."""
        if self.architecture.sandwich_norms:
            attended = self._norm(index, "attn_post_norm", attended)
        if self.architecture.parallel_residual:
            return x + attended + self._feed_forward(index, self._norm(index, "attn_norm", x), msa)
        x = x + attended
        return x + self._feed_forward(index, self._norm(index, "mlp_norm", x), msa)

    def _norm(self, index, name, x):
        return self.own(f"layers.{index}.{name}")(x)

    def _attention(self, index, rows, past):
        msa = None if rows.streams is None else index - self.first_msa_layer
        q, k, v = self._project(index, rows, rows.main, rows.positions, None)
        keys, values = (
            (k, v) if past is None else (torch.cat([p, n], 2) for p, n in zip(past, (k, v), strict=True))
        )
        scores = self._scores(q, keys).masked_fill(~rows.mask[:, None, None], -math.inf)
        if rows.streams is None:
            out = self._mix(scores.softmax(-1), values)
            return self._output(index, "attn", "o", _join_heads(out), None), None, (k, v)
        sq, sk, sv = self._project_streams(index, msa, rows)
        visible = self._visible_to_streams(rows, scores)
        out_streams = self._stream_attention(visible, sq, sk, sv, keys, values)
        if self.config.main_attends_streams:
            out = self._main_with_streams(rows, q, scores, values, sk, sv)
        else:
            out = self._mix(scores.softmax(-1), values)
        joined = _join_heads(out_streams.flatten(2, 3)).unflatten(1, rows.streams.shape[1:3])
        projected = self._output(index, "attn", "o", joined, msa)
        return self._output(index, "attn", "o", _join_heads(out), None), projected, (k, v)

    def _project(self, index, rows, hidden, positions, msa):
        """Normed and rotated q [B, H, T, D], k and v [B, n_kv, T, D]; msa None marks main rows."""
        x = self._norm(index, "attn_norm", hidden)
        d = self.architecture.head_dim
        found = self._with_lora(msa, self.own.project(index, "attn", x), x)
        q, k, v = (found[name].unflatten(-1, (-1, d)) for name in "qkv")
        if self.architecture.qk_norm:
            q, k = self._norm(index, "attn.q_norm", q), self._norm(index, "attn.k_norm", k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        context = rows.context
        if context is None and self.own.rotates_by_length:
            context = int(rows.positions.max()) + 1
        q, k = self.own.rotate(q, k, positions, self.architecture.window(index), context)
        return q, k, v

    def _stream_positions(self, rows, stream_rows):
        """Positions [B, P, γ] of the streams of `stream_rows` [B, P] (docs/method.md, Stream positions)."""
        padded = functional.pad(rows.positions, (0, 1))
        positions = torch.take_along_dim(padded, stream_rows, dim=1)[..., None]
        steps = torch.arange(1, self.config.num_streams + 1, device=positions.device)
        return positions + (steps if self.config.stream_position == "shift" else torch.zeros_like(steps))

    def _project_streams(self, index, msa, rows):
        """q [B, H, P, γ, D], k and v [B, n_kv, P, γ, D] of the streams at their own positions."""
        count, gamma = rows.streams.shape[1:3]
        positions = self._stream_positions(rows, rows.stream_rows).flatten(1)
        flat = self._project(index, rows, rows.streams.flatten(1, 2), positions, msa)
        q, k, v = (t.unflatten(2, (count, gamma)) for t in flat)
        if self.config.value_rotation:
            steps = torch.arange(1, gamma + 1, device=v.device, dtype=v.dtype)
            v = _rotate(v, self.config.value_rotation * steps)
        return q, k, v

    def _visible_to_streams(self, rows, scores):
        """Main keys that streams may see: bool [B, 1 or n_kv, 1 or groups, P, S].

        What their position sees; with `stream_top_keys` only the keys that the position itself
        attends to most, head by head (v2 H.1). scores: of the main rows, masked.
        """
        padded = functional.pad(rows.mask, (0, 0, 0, 1))
        visible = torch.take_along_dim(padded, rows.stream_rows[..., None], dim=1)[:, None, None]
        count = self.config.stream_top_keys
        if not count or count >= scores.shape[-1]:
            return visible
        at_rows = functional.pad(scores.detach(), (0, 0, 0, 1))
        index = rows.stream_rows[:, None, None, :, None]
        best = torch.take_along_dim(at_rows, index, dim=3).topk(count, dim=-1).indices
        chosen = torch.zeros(*best.shape[:-1], scores.shape[-1], dtype=torch.bool, device=scores.device)
        return visible & chosen.scatter(-1, best, True)

    def _stream_attention(self, visible, q, k, v, keys, values):
        """Stream (i, j) over main keys visible to i and streams (i, j' ≤ j). → [B, H, P, γ, D]."""
        gamma = q.shape[3]
        over_main = self._scores(q.flatten(2, 3), keys).unflatten(3, q.shape[2:4])
        over_main = over_main.masked_fill(~visible[:, :, :, :, None], -math.inf)
        grouped = q.unflatten(1, (k.shape[1], -1)) * self.architecture.query_scale
        own = self._cap(torch.einsum("bkgpid,bkpjd->bkgpij", grouped, k))
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
        own_k = k.new_zeros(batch, kv, length + 1, gamma, d).scatter(2, index, k)[:, :, :length]
        own_v = v.new_zeros(batch, kv, length + 1, gamma, d).scatter(2, index, v)[:, :, :length]
        carries = torch.zeros(batch, length + 1, dtype=torch.bool, device=q.device)
        carries = carries.scatter(1, rows.stream_rows, True)[:, None, None, :length, None]
        grouped = q.unflatten(1, (kv, -1)) * self.architecture.query_scale
        own = self._cap(torch.einsum("bkgtd,bktjd->bkgtj", grouped, own_k)).masked_fill(~carries, -math.inf)
        weights = torch.cat([scores, own], -1).softmax(-1)
        over_main, own = weights.split([scores.shape[-1], gamma], -1)
        extra = torch.einsum("bkgtj,bktjd->bkgtd", own, own_v)
        return self._mix(over_main, values) + extra.flatten(1, 2)

    def _feed_forward(self, index, normed, msa):
        """The block on normed rows; for streams the low-rank adapter in place of it, or beside it.

        The adapter's output is not normed again in sandwich layers: it starts at zero, where a norm has
        no useful gradient.
        """
        out = 0
        if msa is None or self.config.stream_mlp == "base":
            out = self._mlp(index, normed, msa)
            if self.architecture.sandwich_norms:
                out = self._norm(index, "mlp_post_norm", out)
        if msa is not None and self.config.stream_adapter_rank:
            out = out + self.parts.stream_adapters[msa](normed)
        return out

    def _mlp(self, index, x, msa):
        found = self._with_lora(msa, self.own.project(index, "mlp", x), x)
        act = ACTIVATIONS[self.architecture.activation]
        inner = act(found["gate"]) * found["up"] if self.architecture.gated_mlp else act(found["up"])
        return self._output(index, "mlp", "down", inner, msa)

    def _output(self, index, block, name, x, msa):
        """The projection that ends a block: `o` or `down`."""
        return self._with_lora(msa, self.own.project(index, block, x, name), x)[name]

    def _with_lora(self, msa, outputs, x):
        """Projections of x by name; on stream rows (msa not None) plus the stream LoRA."""
        if msa is None or not self.config.stream_lora_rank:
            return outputs
        return {name: out + self.parts.stream_lora[msa][name](x) for name, out in outputs.items()}

    def _scores(self, q, keys):
        """[B, H, T, D] × [B, n_kv, S, D] → scaled, capped scores [B, n_kv, groups, T, S]."""
        grouped = q.unflatten(1, (keys.shape[1], -1)) * self.architecture.query_scale
        return self._cap(torch.einsum("bkgtd,bksd->bkgts", grouped, keys))

    def _cap(self, scores):
        return _soft_cap(scores, self.architecture.attention_softcap)

    def _mix(self, weights, values):
        return torch.einsum("bkgts,bksd->bkgtd", weights, values).flatten(1, 2)


def _rotate(values: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Values [..., γ, D] as D/2 complex numbers (halves), turned by `angles` [γ] (v1 App. B, Eq. 7)."""
    real, imaginary = values.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


def _join_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] → [B, T, H·D]."""
    return x.transpose(1, 2).flatten(2)


def _soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def add_lora(model: nn.Module, architecture: Architecture, config: SpeculativeConfig) -> nn.Module:
    """Wrap `model` with PEFT LoRA of the shared mode on all projections; the base stays frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=lora_modules(architecture),
            task_type="CAUSAL_LM",
        ),
    )


def load_stream_model(
    base: BaseFolder, adapter: Adapter, dtype: str = "float32", device: torch.device | str = "cpu"
) -> StreamModel:
    """Base and adapter as one model in evaluation mode on `device`. UserError when they do not fit."""
    adapter.check_base(base)
    return attach_adapter(load_base(base, dtype, device), base.architecture, adapter)


def attach_adapter(model: nn.Module, architecture: Architecture, adapter: Adapter) -> StreamModel:
    """A StreamModel from a loaded Hugging Face model, where that is, and an adapter in memory."""
    first = next(model.parameters())
    if adapter.config.lora_rank:
        model = add_lora(model, architecture, adapter.config)
        _copy_lora(model, architecture, adapter)
    stream_model = StreamModel(model, architecture, adapter.config)
    stream_model.parts.from_numpy(adapter.tensors)
    return stream_model.to(first.device, first.dtype).eval().requires_grad_(False)


def _copy_lora(model: nn.Module, architecture: Architecture, adapter: Adapter) -> None:
    """The adapter's LoRA into PEFT's modules. A fused matrix has one `a`, which its parts must share."""
    for name, module in causal_lm(model).named_modules():
        if not hasattr(module, "lora_A"):
            continue
        keys = [p.name.removesuffix(".weight") for p in canonical_parts(architecture, name + ".weight")]
        a, b = adapter.lora[keys[0]][0], [adapter.lora[key][1] for key in keys]
        for key in keys[1:]:
            if not np.array_equal(adapter.lora[key][0], a):
                raise UserError(
                    f"adapter '{adapter.app}': LoRA of '{key}' and '{keys[0]}', one matrix in this base, "
                    f"must share their factor a"
                )
        with torch.no_grad():
            module.lora_A["default"].weight.copy_(torch.from_numpy(a))
            module.lora_B["default"].weight.copy_(torch.from_numpy(np.concatenate(b)))
