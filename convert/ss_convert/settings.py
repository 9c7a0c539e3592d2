"""Settings of a conversion: the options of `ss-convert` and the keywords of `ss_convert.convert`."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ss_convert.graph.options import CHOICES, PRESETS, GraphOptions
from ss_convert.graph.weight_format import WEIGHT_FORMATS
from ss_device.command_line import DEVICES, device_help, positive
from ss_device.config import PRUNE_OVER
from ss_device.settings import setting

TARGETS = ("coreml", "mlx", "mlxfn", "coreai")
DEFAULT_TARGETS = ("coreml", "mlx")
# By a name in --target. Functions are made from the MLX weights, so a bundle has both.
TARGETS_OF = {"coreml": ("coreml",), "mlx": ("mlx",), "mlxfn": ("mlx", "mlxfn"), "both": DEFAULT_TARGETS}
TARGETS_OF |= {"coreai": ("coreai",), "all": TARGETS}
FUNCTION_DTYPES = ("float16", "float32", "bfloat16")
PACKAGE = "Core ML package and Core AI asset (with --into: as it is in the bundle)"


def _default(name: str) -> str:
    """What a choice of the graph is without a preset and with each."""
    said = {
        None: getattr(GraphOptions, name),
        **{preset: chosen[name] for preset, chosen in PRESETS.items()},
    }
    texts = {p: "on" if v is True else "off" if v is False else str(v) for p, v in said.items()}
    presets = ", ".join(f"{texts[preset]} with {preset}" for preset in sorted(PRESETS))
    return f"(default {texts[None]}; {presets})"


def _count(text: str) -> int:
    """argparse type: 0 or more."""
    return 0 if text.strip() == "0" else positive(text)


def _parts(text: str) -> int | str:
    """argparse type: 1 or more, or `auto`."""
    return "auto" if text.strip() == "auto" else positive(text)


def _targets(text: str) -> tuple[str, ...]:
    """argparse type: the targets behind names with commas in between."""
    found = []
    for name in text.split(","):
        if name.strip() not in TARGETS_OF:
            known = ", ".join(map(repr, TARGETS_OF))
            raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {known})")
        found += TARGETS_OF[name.strip()]
    return tuple(target for target in TARGETS if target in found)


@dataclass(frozen=True, kw_only=True)
class PackageSettings:
    """What the functions of all adapters in a package or asset have in common; None: not said.

    parts: number of packages, or `auto` until the `cuts` between them are chosen (first layers of all parts
    but the first). Golden traces and exported MLX functions have these num_nodes, context and chunk too.
    """

    num_nodes: int | None = setting(
        flag="--nodes", parse=positive, metavar="N", group=PACKAGE, help="tree nodes per step (default 32)"
    )
    context: int | None = setting(
        parse=positive, metavar="N", group=PACKAGE, help="tokens the cache holds (default 512)"
    )
    chunk: int | None = setting(
        flag="--prefill",
        aliases=("--chunk",),
        parse=positive,
        metavar="N",
        group=PACKAGE,
        help="prompt tokens per prefill call (default 64)",
    )
    preset: str | None = setting(
        choices=sorted(PRESETS),
        group=PACKAGE,
        help="choices that suit an engine; the choices below override it",
    )
    layout: str | None = setting(
        choices=CHOICES["layout"],
        group=PACKAGE,
        help=f"products as linear or as 1×1 convolution {_default('layout')}",
    )
    attention: str | None = setting(
        choices=CHOICES["attention"],
        group=PACKAGE,
        help=f"products and softmax, or the fused operation {_default('attention')}",
    )
    commit: str | None = setting(
        choices=CHOICES["commit"],
        group=PACKAGE,
        help=f"how accepted rows are moved to their slots {_default('commit')}",
    )
    head_split: int | None = setting(
        parse=_count,
        metavar="V",
        group=PACKAGE,
        help=f"most outputs of a product of the head, 0: all {_default('head_split')}",
    )
    pad_state: bool | None = setting(
        group=PACKAGE,
        help=f"round the state's last dimension up to a multiple of 32 {_default('pad_state')}",
    )
    parts: int | str | None = setting(
        parse=_parts,
        metavar="N|auto",
        group=PACKAGE,
        help="packages that the layers are divided into; auto: files under 1 GB (default 1)",
    )
    cuts: tuple[int, ...] | None = None
    weights: str | None = setting(
        choices=WEIGHT_FORMATS,
        group=PACKAGE,
        help="how the base's projections are stored (default fp16)",
    )
    embedding_weights: str | None = setting(
        choices=WEIGHT_FORMATS,
        group=PACKAGE,
        help="how embedding and head are stored (default: fp16 with fp16, else int8)",
    )
    lora: str | None = setting(
        choices=CHOICES["lora"],
        group=PACKAGE,
        help="adapters as constants of functions of their own, or as inputs of functions that all share "
        "(shared mode only; default baked)",
    )
    lora_rank: int | None = setting(
        parse=positive,
        metavar="R",
        group=PACKAGE,
        help="rank that LoRA inputs are padded to (default: the largest, up to a multiple of 32)",
    )
    coreai_cache: str | None = setting(
        choices=CHOICES["cache"],
        group=PACKAGE,
        help="keys and values of a Core AI asset as a state, or as inputs whose new rows the host writes "
        "(default state; inputs with preset ane)",
    )
    sampling: bool | None = setting(
        action="store_true",
        group=PACKAGE,
        help="the step returns the logits of all kept nodes and their streams, for sampling on the host",
    )

    def to_dict(self) -> dict:
        return asdict(self)

    def graph_options(self, num_kept: int, prune_over: str) -> GraphOptions:
        """The options of one adapter's functions; all settings must be made (`resolve_settings`)."""
        known = {f.name for f in fields(GraphOptions)}
        shared = {name: value for name, value in self.to_dict().items() if name in known}
        shared["chunk"] = min(self.chunk, self.context)
        return GraphOptions(**shared, num_kept=num_kept, prune_over=prune_over)


@dataclass(frozen=True, kw_only=True)
class ConversionSettings(PackageSettings):
    """All that a user says of a conversion; None: the default that fits. Sizes in tokens.

    adapters: names or paths; into: bundle that the adapters are added to, everything in it staying as it
    is; prune_in_graph: None where `num_kept` says it; function_dtype: of exported MLX functions; device:
    where the golden traces are recorded (`cpu`, `cuda`, `mps`; None: what is there).
    """

    adapters: tuple[str, ...] = setting(
        (),
        flag="--adapter",
        required=True,
        metavar="NAME|PATH",
        help="adapter folder, or its name under models/adapters; may be repeated",
    )
    base: Path | None = setting(
        metavar="PATH|ID",
        help="base model folder or id on the Hugging Face hub (default: the adapter's, under models/base)",
    )
    models: Path | None = setting(
        metavar="DIR", help="folder with base/ and adapters/ (default: $SS_MODELS or models)"
    )
    output: Path | None = setting(
        metavar="DIR", exclusive="place", help="bundle folder (default: build/<app>)"
    )
    into: Path | None = setting(
        metavar="BUNDLE", exclusive="place", help="add the adapters to an existing bundle"
    )
    targets: tuple[str, ...] | None = setting(
        flag="--target",
        parse=_targets,
        metavar="{" + ",".join(TARGETS_OF) + "}",
        help="coreml, mlx, mlxfn (mlx and exported MLX functions), coreai, both (coreml and mlx, the "
        "default) or all; several with commas; with --into the bundle's",
    )
    function_dtype: str | None = setting(
        flag="--mlxfn-dtype",
        choices=FUNCTION_DTYPES,
        help=f"dtype of exported MLX functions (default {FUNCTION_DTYPES[0]})",
    )
    num_kept: int | None = setting(
        flag="--keep",
        parse=positive,
        metavar="K",
        help="nodes left after early-exit pruning (default: all)",
    )
    prune_over: str | None = setting(
        choices=PRUNE_OVER,
        help="what early-exit scores are normalised over (with pruning; default draft)",
    )
    prune_in_graph: bool | None = setting(
        group=PACKAGE,
        help="early-exit pruning inside the step, to --keep nodes or half of --nodes (default: where "
        "--keep is below --nodes)",
    )
    golden_prompts: Path | None = setting(
        metavar="FILE",
        exclusive="golden",
        help="JSON lines with 'prompt' or the application's fields (default: the adapter folder's)",
    )
    golden: bool = setting(
        True,
        flag="--no-golden",
        action="store_false",
        exclusive="golden",
        help="write no golden traces",
    )
    device: str | None = setting(choices=DEVICES, help=device_help("golden traces"))

    @property
    def package(self) -> PackageSettings:
        """What concerns all functions of the package."""
        return PackageSettings(**{f.name: getattr(self, f.name) for f in fields(PackageSettings)})
