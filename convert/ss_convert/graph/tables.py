"""Constant tables of the graphs: rotary positions and which stream sees which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ss_convert.graph.interface import MASKED
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig
from ss_device.rotary import attention_factor, inverse_frequencies

REST_SCALE = 2048


@dataclass(frozen=True)
class RotaryTable:
    """values: float32 [positions, rotated], cosines then sines of each position's angles.

    Heads are turned in halves with the same angles, queries with `scale` times them: what a function
    needs twice is made from the rows that it reads (`layers.gather_rotary`), not stored twice.
    """

    values: np.ndarray
    scale: np.float32

    def in_halves(self) -> tuple[np.ndarray, np.ndarray]:
        """What `layers.gather_rotary` makes of every row, fp16 [positions, 4·rotated], and its rest.

        The rest is REST_SCALE times too large: subnormal numbers may be taken for zeros.
        """
        cosine, sine = np.split(self.values, 2, axis=1)
        keys = np.concatenate([cosine, cosine, -sine, sine], axis=1)
        both = np.concatenate([keys * self.scale, keys], axis=1)
        left = both - both.astype(np.float16).astype(np.float32)
        return both.astype(np.float16), (left * REST_SCALE).astype(np.float16)


def rotary_tables(
    architecture: Architecture, num_positions: int, context: int
) -> dict[int | None, RotaryTable | None]:
    """The layers' rotary tables by window, None with learned positions; equal ones are one object.

    context in tokens decides LongRoPE's factors (`ss_device.rotary`).
    """
    tables: dict[int | None, RotaryTable | None] = {}
    for window in architecture.distinct_windows:
        table = rotary_table(architecture, num_positions, window, context) if architecture.rotated else None
        others = (t for t in tables.values() if t is not None and table is not None)
        tables[window] = next((t for t in others if np.array_equal(t.values, table.values)), table)
    return tables


def rotary_table(
    architecture: Architecture, num_positions: int, window: int | None = None, context: int | None = None
) -> RotaryTable:
    """Cosines and sines of positions 0..num_positions-1, and the scale of the queries.

    float32, since fp16 would round what the other back ends compute. Angles are rounded as in Hugging
    Face's rotary embedding (float32 throughout). context: by default `num_positions`.
    """
    inverse = inverse_frequencies(architecture, window, context or num_positions)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse[None]
    factor = np.float32(attention_factor(architecture, window))
    values = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factor
    return RotaryTable(values.astype(np.float32), np.float32(architecture.query_scale))


def stream_offsets(config: SpeculativeConfig) -> np.ndarray:
    """int32 [γ]: how far stream j's position lies behind its node's (docs/method.md, Stream positions)."""
    steps = np.arange(1, config.num_streams + 1, dtype=np.int32)
    return steps if config.stream_position == "shift" else np.zeros_like(steps)


def value_turns(config: SpeculativeConfig, num_kept: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine float32 [K·γ, head_dim] of the streams' angles j·ε, as `rotate` takes them."""
    angles = np.float32(config.value_rotation) * np.arange(1, config.num_streams + 1, dtype=np.float32)
    angles = np.repeat(np.tile(angles, num_kept)[:, None], head_dim // 2, axis=1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([cosine, cosine], axis=1), np.concatenate([-sine, sine], axis=1)


def rest(table: np.ndarray) -> np.ndarray:
    """fp16: what is left of a float32 table behind its values rounded to fp16."""
    return (table - table.astype(np.float16).astype(np.float32)).astype(np.float16)


def own_stream_mask(config: SpeculativeConfig, num_kept: int) -> np.ndarray:
    """fp16 [K·(1+γ), K·γ]: additive mask of the stream columns, rows as [main | streams].

    Stream (i, j) sees streams (i, j' ≤ j); main i sees its own streams with `main_attends_streams`
    (docs/method.md, Mask rules).
    """
    gamma = config.num_streams
    same_node = np.eye(num_kept, dtype=bool)
    lower = np.tril(np.ones((gamma, gamma), dtype=bool))
    main = np.kron(same_node, np.ones((1, gamma), dtype=bool)) & config.main_attends_streams
    visible = np.concatenate([main, np.kron(same_node, lower)], axis=0)
    return np.where(visible, 0.0, MASKED).astype(np.float16)


def main_stream_columns(config: SpeculativeConfig, num_kept: int) -> np.ndarray:
    """fp16 [K·(1+γ), K·γ]: 1 where a main row meets its own streams, what the gate acts on."""
    gamma = config.num_streams
    main = np.kron(np.eye(num_kept), np.ones((1, gamma)))
    return np.concatenate([main, np.zeros((num_kept * gamma, num_kept * gamma))]).astype(np.float16)
