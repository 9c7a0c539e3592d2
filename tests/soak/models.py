"""What a case decodes with, drawn from seed and index: a family's random base, adapters, dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from ss_device.bundle import Bundle
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_device.sampling import Sampler
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.samplers import build_sampler
from ss_runtime.settings import RuntimeSettings
from tests.families.tiny import CASES, VOCAB, make_base
from tests.runtime.bundles import make_bundle

NODES = 8
DTYPES = {"float32": 3, "float16": 2, "bfloat16": 1}


@dataclass(frozen=True)
class Setting:
    """One case's choices. configs: adapter → its settings."""

    seed: int
    index: int
    family: str
    dtype: str
    kv_bits: int | None
    configs: dict[str, SpeculativeConfig]

    @property
    def id(self) -> str:
        return f"{self.seed}:{self.index}"

    def rng(self, purpose: str) -> Random:
        """Random numbers of their own for each purpose."""
        return Random(f"{self.id} {purpose}")

    def label(self) -> str:
        modes = ", ".join(f"{name} {_mode(config)}" for name, config in self.configs.items())
        bits = f", keys and values in {self.kv_bits} bits" if self.kv_bits else ""
        return f"{self.family}, {self.dtype}{bits}: {modes}"


def _mode(config: SpeculativeConfig) -> str:
    return "lossless" if config.mode == "lossless" else f"shared v{1 + config.main_attends_streams}"


def make_setting(seed: int, index: int) -> Setting:
    """The case of that number: two or three adapters of drawn modes over one base."""
    rng = Random(f"{seed}:{index}")
    names = ("one", "two", "three")[: rng.choice((2, 3))]
    configs = {name: _config(rng, rng.choice(("lossless", "lossless", "v1", "v2"))) for name in names}
    dtype = rng.choices(list(DTYPES), weights=list(DTYPES.values()))[0]
    kv_bits = rng.choice((None, None, None, 8, 4))
    return Setting(seed, index, rng.choice(list(CASES)), dtype, kv_bits, configs)


def _config(rng: Random, mode: str) -> SpeculativeConfig:
    shared = mode != "lossless"
    lora = {"lora_rank": 3, "lora_alpha": 6.0} if shared else {}
    return SpeculativeConfig(
        mode="shared" if shared else "lossless",
        main_attends_streams=mode == "v2",
        num_streams=rng.randint(1, 4),
        num_msa_layers=rng.randint(1, 3),
        stream_mlp=rng.choice(("adapter", "base")),
        stream_position=rng.choice(("shift", "same")),
        stream_adapter_rank=rng.choice((0, 4)),
        stream_init_rank=rng.choice((0, 2)),
        stream_lora_rank=(stream_rank := rng.choice((0, 3))),
        stream_lora_alpha=6.0 if stream_rank else 0.0,
        pruning_rank=rng.choice((0, 4)),
        bigram_rank=rng.choice((0, 4)),
        stream_top_keys=rng.choice((0, 0, 0, 5)),
        **lora,
    )


def open_bank(setting: Setting, folder: Path) -> tuple[Bundle, AdapterBank]:
    """The case's bundle, written below `folder`, and its adapters loaded over one base."""
    import torch

    torch.manual_seed(setting.index)
    base = make_base(setting.family, folder / "base", seed=setting.index)
    bundle = make_bundle(folder / "bundle", base, setting.configs, num_nodes=NODES)
    try:
        bank = AdapterBank(bundle, RuntimeSettings(dtype=setting.dtype, kv_bits=setting.kv_bits))
    except UserError:  # heads whose size cannot be quantized
        bank = AdapterBank(bundle, RuntimeSettings(dtype=setting.dtype))
    return bundle, bank


def make_drafter(rng: Random, config: SpeculativeConfig, bigram_bias) -> Drafter:
    """Shape, size, streams and prompt lookup of the drafts."""
    shape = rng.choice(("best-first", "best-first", "chain", "k-ary"))
    lookup = PromptLookup() if shape != "k-ary" and rng.random() < 0.5 else None
    return Drafter(
        rng.randint(2, NODES),
        shape,
        rng.randint(1, 3),
        bigram_bias,
        max_streams=rng.choice((None, None, 1, config.num_streams)),
        lookup=lookup,
        use_streams=lookup is None or rng.random() < 0.8,
    )


def choose_pruning(rng: Random, config: SpeculativeConfig) -> int:
    """Nodes that are kept: all of them without a pruning head, and every other time with one."""
    return rng.randint(1, NODES) if config.pruning_rank and rng.random() < 0.5 else NODES


def draw_sampler(rng: Random) -> Sampler | None:
    """Greedy, or sampling with a seed, filters and penalties."""
    if rng.random() < 0.4:
        return None
    settings: dict = {"seed": rng.getrandbits(40)}
    if rng.random() < 0.5:
        settings["top_p"] = rng.choice((0.5, 0.9, 0.99))
    if rng.random() < 0.3:
        settings["top_k"] = rng.choice((1, 5, 50))
    if rng.random() < 0.3:
        settings["min_p"] = rng.choice((0.01, 0.2))
    penalties = {"repetition": 1.2} if rng.random() < 0.3 else {}
    return build_sampler(rng.choice((0.5, 1.0, 1.5)), settings, penalties)


def make_prompts(rng: Random, count: int, longest: int) -> list[list[int]]:
    """Prompts of at most `longest` tokens that repeat themselves; some begin like the one before."""
    prompts: list[list[int]] = []
    for _ in range(count):
        phrase = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 8))]
        prompt = [1, *(phrase * rng.randint(1, 3))][:longest]
        if prompts and rng.random() < 0.5:
            common = prompts[-1][: rng.randint(1, len(prompts[-1]))]
            prompt = (common + phrase)[:longest]
        prompts.append(prompt)
    return prompts
