"""Architecture: one frozen description of a decoder that every back end builds from."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ss_device.errors import UserError
from ss_device.strict_json import typed
from ss_device.token_ids import is_token_id, outside_text

ATTENTION = ("q", "k", "v", "o")
PROJECTIONS = (*ATTENTION, "gate", "up", "down")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
CHOICES = {"activation": ACTIVATIONS, "positions": ("rotary", "learned"), "norm": ("rms", "layer")}
LEAST_EPS = 1e-30  # float32 ends not far below
# Far above any model: what a damaged file says must not become a loop or a buffer.
LIMITS = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_layers": 1 << 12,
    "num_heads": 1 << 14, "num_kv_heads": 1 << 14, "head_dim": 1 << 14, "max_positions": 1 << 27,
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; `ss_device.rotary` has the formulas.

    kind: `linear` (factor), `llama3` (factor, low_freq_factor, high_freq_factor, original_positions) or
    `longrope` (one divisor per frequency: short_factors for contexts up to original_positions,
    long_factors beyond). attention_factor multiplies every cosine and sine.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder. Sizes in elements; what a family does not have keeps its default.

    positions: `rotary`, or `learned`: a table whose row position + position_offset is added to the
        embedding. rotary_dims: rotated features of each head, from the first (0: all).
        local_rope_theta: theta of the layers with a window, unscaled (None: as the others).
    norm: `rms` or `layer`; its gain is weight + norm_offset. sandwich_norms: attention and feed-forward
        outputs are normed too, before they are added. qk_norm: an RMSNorm over each head's query and key.
    biases: projections (`q k v o gate up down`) with a bias. parallel_residual: attention and feed-forward
        both read one norm and are added together.
    attention_scale: what queries are multiplied by (None: 1/√head_dim); soft caps: cap · tanh(x / cap).
    windows: per layer how many positions a row sees, its own included (None: all); () means no windows.
        A row at position p sees keys at positions > p - window.
    bos_id: put in front of prompts, so it has a row in the embedding (UserError if not). eos_ids: any of
        them ends a text. Configurations name some beyond the vocabulary, which no model can choose: they
        stay, and are never fed (`end_id`).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool
    activation: str = "silu"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    positions: str = "rotary"
    position_offset: int = 0
    rotary_dims: int = 0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    head_bias: bool = False
    gated_mlp: bool = True
    parallel_residual: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            if not 1 <= getattr(self, name) <= most:
                raise UserError(f"{name} {getattr(self, name)} must lie between 1 and {most}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(f"{name} '{getattr(self, name)}' is not one of {', '.join(known)}")
        _expect(self.num_heads % self.num_kv_heads == 0, "num_heads is no multiple of num_kv_heads")
        _expect(0 <= self.rotary_dims <= self.head_dim, f"rotary_dims {self.rotary_dims} exceeds head_dim")
        _expect(self.rotated % 2 == 0, f"an odd number of rotated features ({self.rotated})")
        _expect(self.position_offset >= 0, "position_offset must not be negative")
        _expect(self.norm_eps >= LEAST_EPS, f"norm_eps {self.norm_eps} must be at least {LEAST_EPS}")
        _expect(not self.rotated or self.rope_theta > 0, f"rope_theta {self.rope_theta} must be above 0")
        _expect(set(self.biases) <= set(PROJECTIONS), f"biases {self.biases} are not of {PROJECTIONS}")
        _expect(len(self.windows) in (0, self.num_layers), "windows are not one for each layer")
        _expect(all(w is None or w >= 1 for w in self.windows), "a window must be at least 1")
        if self.bos_id is not None and not is_token_id(self.bos_id, self.vocab_size):
            raise UserError(f"bos_id: {outside_text(self.bos_id, self.vocab_size)}")
        if strange := [i for i in self.eos_ids if type(i) is not int]:
            raise UserError(f"eos_ids: {strange[0]!r} is not a token id")

    @property
    def end_id(self) -> int:
        """The end token that is written behind a text: the first of `eos_ids` that the model has.

        Raises UserError where it has none.
        """
        found = next((i for i in self.eos_ids if is_token_id(i, self.vocab_size)), None)
        if found is None:
            given = ", ".join(map(str, self.eos_ids)) or "none given"
            raise UserError(
                f"the base has no end token: eos_token_id ({given}) names none of its "
                f"{self.vocab_size} tokens"
            )
        return found

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before they meet keys."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rotated(self) -> int:
        """Features of each head that rotary positions turn; 0 with learned positions."""
        return 0 if self.positions == "learned" else self.rotary_dims or self.head_dim

    @property
    def default_context(self) -> int:
        """Longest text without an explicit choice: LongRoPE's short factors hold up to their own limit."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            return min(self.max_positions, scaling.original_positions)
        return self.max_positions

    def window(self, layer: int) -> int | None:
        """How many positions a row of `layer` sees, None for all."""
        return self.windows[layer] if self.windows else None

    @property
    def distinct_windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers, in order of appearance."""
        return tuple(dict.fromkeys(self.window(layer) for layer in range(self.num_layers)))

    def rope_theta_of(self, window: int | None) -> float:
        """Rotary theta of the layers with this window."""
        local = window is not None and self.local_rope_theta is not None
        return self.local_rope_theta if local else self.rope_theta

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's linear projections, by canonical short name."""
        h, q, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        shapes = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        if self.gated_mlp:
            shapes["gate"] = (self.intermediate_size, h)
        return shapes | {"up": (self.intermediate_size, h), "down": (h, self.intermediate_size)}

    def norm_names(self) -> tuple[str, ...]:
        """A layer's norms over the hidden size, in the order in which they act."""
        if self.parallel_residual:
            return ("attn_norm",)
        if self.sandwich_norms:
            return ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
        return ("attn_norm", "mlp_norm")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of every base weight.

        `embed.weight`, `positions.weight` (learned), `layers.{i}.<norm>.weight` (`norm_names`),
        `layers.{i}.attn.{q,k,v,o}.weight`, `layers.{i}.attn.{q,k}_norm.weight` (qk_norm),
        `layers.{i}.mlp.{gate,up,down}.weight`, `norm.weight`, `head.weight` (absent when tied), and
        `.bias` beside a `.weight` where there is one. Linear weights are [out, in].
        """
        h = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, h)}
        if self.positions == "learned":
            shapes["positions.weight"] = (self.max_positions + self.position_offset, h)
        for layer in range(self.num_layers):
            for name in self.norm_names():
                shapes |= self._norm_shapes(f"layers.{layer}.{name}")
            for name, shape in self.projection_shapes().items():
                path = f"layers.{layer}.{block_of(name)}.{name}"
                shapes[f"{path}.weight"] = shape
                if name in self.biases:
                    shapes[f"{path}.bias"] = shape[:1]
            if self.qk_norm:
                for name in ("q_norm", "k_norm"):
                    shapes[f"layers.{layer}.attn.{name}.weight"] = (self.head_dim,)
        shapes |= self._norm_shapes("norm")
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab_size, h)
        if self.head_bias:
            shapes["head.bias"] = (self.vocab_size,)
        return shapes

    def _norm_shapes(self, path: str) -> dict[str, tuple[int, ...]]:
        kinds = ("weight", "bias") if self.norm_bias else ("weight",)
        return {f"{path}.{kind}": (self.hidden_size,) for kind in kinds}

    def num_parameters(self) -> int:
        total = 0
        for shape in self.weight_shapes().values():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict) -> Architecture:
        """Inverse of `to_dict`; unknown keys mean a newer format and are refused by name."""
        return typed(Architecture, raw, "architecture")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def block_of(projection: str) -> str:
    """The block (`attn` or `mlp`) that a projection belongs to in canonical names."""
    return "attn" if projection in ATTENTION else "mlp"
