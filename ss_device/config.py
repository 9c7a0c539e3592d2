"""SpeculativeConfig: every setting of the streams of one adapter, as stored in its folder."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ss_device.architecture import Architecture
from ss_device.errors import UserError
from ss_device.old_names import CONFIG, renamed
from ss_device.strict_json import typed

MODES = ("lossless", "shared")
STREAM_MLPS = ("adapter", "base")
STREAM_POSITIONS = ("shift", "same")
# What the scores of early-exit pruning are normalised over: a draft's own tokens, or all of them.
PRUNE_OVER = ("draft", "vocabulary")
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Streams, modes and ranks (docs/method.md, Streams). 0 switches a part off.

    num_streams γ; num_msa_layers N_s; stream_mlp: `adapter` puts the low-rank adapter in place of the
    feed-forward block for stream rows, `base` adds it to the block's output; stream_init_rank: f_η
    (0 = identity); bigram_rank: bigram bias; stream_lora_rank/alpha: LoRA on stream rows only;
    lora_rank/alpha: LoRA of main and streams (shared mode, PEFT files); value_rotation: ε, radians per
    stream by which stream values are turned in place of stream embeddings (v1 App. B, Eq. 7; the paper
    bounds ε by π/2N, this project by a quarter turn over all streams); stream_top_keys: streams see only
    as many main keys as this, those their position attends to most (v2 H.1; 0 = all); bigram_shared: the
    bigram bias was trained once for the base and is the same in all adapters that say so.
    """

    mode: str = "lossless"
    num_streams: int = 4
    num_msa_layers: int = 4
    main_attends_streams: bool = False
    stream_mlp: str = "adapter"
    stream_position: str = "shift"
    stream_adapter_rank: int = 8
    stream_init_rank: int = 0
    stream_lora_rank: int = 0
    stream_lora_alpha: float = 0.0
    pruning_rank: int = 8
    bigram_rank: int = 0
    lora_rank: int = 0
    lora_alpha: float = 0.0
    value_rotation: float = 0.0
    stream_top_keys: int = 0
    bigram_shared: bool = False

    def __post_init__(self) -> None:
        _expect(self.mode in MODES, f"mode '{self.mode}' is not one of {', '.join(MODES)}")
        _expect(self.num_streams >= 1, f"num_streams {self.num_streams} must be at least 1")
        _expect(self.num_msa_layers >= 1, f"num_msa_layers {self.num_msa_layers} must be at least 1")
        _expect(
            self.stream_mlp in STREAM_MLPS,
            f"stream_mlp '{self.stream_mlp}' is not one of {', '.join(STREAM_MLPS)}",
        )
        _expect(
            self.stream_position in STREAM_POSITIONS,
            f"stream_position '{self.stream_position}' is not one of {', '.join(STREAM_POSITIONS)}",
        )
        _expect(
            self.mode == "shared" or not self.main_attends_streams,
            "main_attends_streams needs mode 'shared': it changes the main stream",
        )
        _expect(
            self.mode == "shared" or self.lora_rank == 0,
            "lora_rank needs mode 'shared': a lossless base stays untouched",
        )
        _expect(self.bigram_rank > 0 or not self.bigram_shared, "bigram_shared needs a bigram_rank above 0")
        for name in (
            "stream_adapter_rank",
            "stream_init_rank",
            "stream_lora_rank",
            "pruning_rank",
            "bigram_rank",
            "lora_rank",
            "value_rotation",
            "stream_top_keys",
        ):
            _expect(getattr(self, name) >= 0, f"{name} must not be negative")
        _expect(
            self.value_rotation * self.num_streams <= math.pi / 2,
            f"value_rotation {self.value_rotation} turns stream {self.num_streams} by more than π/2",
        )

    def check(self, architecture: Architecture) -> None:
        """Raise UserError when the settings do not fit a base model."""
        _expect(
            self.num_msa_layers <= architecture.num_layers,
            f"num_msa_layers {self.num_msa_layers} exceeds the base model's "
            f"{architecture.num_layers} layers",
        )
        _expect(
            self.num_streams < architecture.max_positions,
            f"num_streams {self.num_streams} must be below the base model's context of "
            f"{architecture.max_positions}",
        )

    @property
    def stream_lora_scale(self) -> float:
        return self.stream_lora_alpha / self.stream_lora_rank if self.stream_lora_rank else 0.0

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict) -> SpeculativeConfig:
        """Inverse of `to_dict`; an unknown key is a UserError (a newer format, or a typo)."""
        return typed(SpeculativeConfig, renamed(raw, CONFIG), "speculative config")


def paper_config(mode: str = "lossless", **changes) -> SpeculativeConfig:
    """The papers' settings: γ 4, N_s 4, rank 8 adapters, no bigram bias, no stream LoRA."""
    if mode == "shared":
        shared = {
            "stream_mlp": "base",
            "stream_adapter_rank": 0,
            "lora_rank": 32,
            "lora_alpha": 64.0,
        }
        return SpeculativeConfig(**{"mode": mode, **shared, **changes})
    return SpeculativeConfig(**{"mode": mode, **changes})


def plus_config(**changes) -> SpeculativeConfig:
    """SS+ (docs/method.md, SS+): streams through the frozen MLP, stream LoRA, and a bigram bias."""
    plus = {
        "stream_mlp": "base",
        "stream_lora_rank": 32,
        "stream_lora_alpha": 64.0,
        "bigram_rank": 32,
    }
    return SpeculativeConfig(**{**plus, **changes})


def parameter_count(config: SpeculativeConfig, architecture: Architecture) -> dict[str, int]:
    """Parameters an adapter adds to its base, by part.

    With shared mode's defaults the speculative parts are γ·h + 2·8·h = 20·h, with lossless mode's a stream
    adapter of 2·8·h in each of four layers more: 84·h (docs/method.md, Parameter counts). LoRA is counted
    apart because plain fine-tuning needs it too, and so is a bigram bias that adapters share.
    """
    h, layers = architecture.hidden_size, config.num_msa_layers
    sizes = {n: sum(s) for n, s in architecture.projection_shapes().items()}
    bias = 2 * config.bigram_rank * architecture.vocab_size
    return {
        "stream_embeddings": 0 if config.value_rotation else config.num_streams * h,
        "stream_init": 2 * config.stream_init_rank * h,
        "stream_adapters": layers * 2 * config.stream_adapter_rank * h,
        "stream_lora": layers * config.stream_lora_rank * sum(sizes.values()),
        "pruning_head": 2 * config.pruning_rank * h,
        "bigram_bias": 0 if config.bigram_shared else bias,
        "shared_bigram_bias": bias if config.bigram_shared else 0,
        "lora": architecture.num_layers * config.lora_rank * sum(sizes.values()),
    }


def tensor_shapes(config: SpeculativeConfig, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in `speculative.safetensors`.

    LoRA factors: `a` [rank, in], `b` [out, rank]; layers count from the first MSA layer.
    """
    h, v = architecture.hidden_size, architecture.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.value_rotation:
        shapes["stream_embeddings"] = (config.num_streams, h)
    if rank := config.stream_init_rank:
        shapes |= {"stream_init.down": (rank, h), "stream_init.up": (h, rank)}
    for layer in range(config.num_msa_layers):
        if rank := config.stream_adapter_rank:
            shapes[f"stream_adapters.{layer}.down"] = (rank, h)
            shapes[f"stream_adapters.{layer}.up"] = (h, rank)
        if rank := config.stream_lora_rank:
            for target, (outputs, inputs) in architecture.projection_shapes().items():
                shapes[f"stream_lora.{layer}.{target}.a"] = (rank, inputs)
                shapes[f"stream_lora.{layer}.{target}.b"] = (outputs, rank)
    if rank := config.pruning_rank:
        shapes |= {"pruning.a": (rank, h), "pruning.b": (h, rank)}
    if rank := config.bigram_rank:
        shapes |= {"bigram.u": (v, rank), "bigram.v": (v, rank)}
    return shapes


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
