"""How an adapter is run: back end, drafts, sampling. Options of commands are made of the fields."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from ss_device.bundle import Bundle, BundledAdapter, StepFunctions
from ss_device.command_line import DEVICES, device_help, positive
from ss_device.config import PRUNE_OVER
from ss_device.decoding import SHAPES, Drafter
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_device.sampling import Sampler
from ss_device.settings import setting
from ss_device.tree import BigramBias
from ss_runtime.coreml.engines import COMPUTE_UNITS
from ss_runtime.plain_base import has_streams
from ss_runtime.samplers import build_sampler

DTYPES = {
    "mlx": ("float16", "float32", "bfloat16"),
    "executor": ("float16", "float32"),
    "reference": ("float32", "float16", "bfloat16"),
    "coreml": ("float16",),
    "coreai": ("float16", "float32"),
    "mlxfn": ("float16", "float32", "bfloat16"),
}
BACKENDS = tuple(DTYPES)
# Those that run the functions of assets and packages, by the entry of an adapter that names its own.
FUNCTION_BACKENDS = {"coreai": "coreai", "coreml": "coreml", "executor": "coreml"}
# What a server and a benchmark can run.
SERVING_BACKENDS = ("mlx", *FUNCTION_BACKENDS)
WITH_UNITS = ("coreml", "coreai")
QUANTIZATIONS = ("4", "8", "mxfp4")
KV_BITS = (4, 8)
STREAM_ROWS = ("kept", "accepted", "none")
SAMPLING = "sampling (default: greedy)"


@dataclass(frozen=True)
class RuntimeSettings:
    """The back end of an adapter. None: what suits the bundle and this machine (`for_adapter`).

    num_nodes N, num_kept K: nodes of a step, and those that early-exit pruning keeps; context in tokens;
    prune_over: `draft` or `vocabulary` (docs/method.md, Pruning). Of MLX alone: stream_rows, bucket and
    compiled, as `MLXStepModel` explains them.
    """

    backend: str | None = setting(
        metavar="NAME", help=f"{', '.join(BACKENDS)} (default: MLX where it can run)"
    )
    dtype: str | None = setting(
        choices=sorted(set(sum(DTYPES.values(), ()))), help="what the back end computes in"
    )
    quantize: str | None = setting(
        choices=QUANTIZATIONS, help="MLX: pack the base to affine 4 or 8 bits, or mxfp4"
    )
    compute_units: str | None = setting(
        choices=tuple(COMPUTE_UNITS), help="engines that Core ML may use, or Core AI prefers (default all)"
    )
    device: str | None = setting(
        choices=DEVICES,
        help=device_help("--backend reference"),
    )
    kv_bits: int | None = setting(choices=KV_BITS, help="MLX: keep keys and values in 4 or 8 bits")
    num_nodes: int | None = None
    num_kept: int | None = None
    context: int | None = None
    prune_over: str | None = None
    stream_rows: str | None = None
    bucket: int | None = None
    compiled: bool | None = None

    def for_adapter(self, bundle: Bundle, adapter: BundledAdapter) -> RuntimeSettings:
        """With the sizes and the pruning of the bundle, so that all its back ends prune alike."""
        package = adapter.coreml or adapter.coreai
        nodes = self.num_nodes or adapter.num_nodes
        return replace(
            self,
            num_nodes=nodes,
            num_kept=self.num_kept or min(package.num_kept if package else nodes, nodes),
            context=self.context or bundle.manifest.architecture.default_context,
            prune_over=self.prune_over or (package.prune_over if package else PRUNE_OVER[0]),
        )

    def without_streams(self, adapter: BundledAdapter) -> RuntimeSettings:
        """For decoding that drafts nothing from streams. Those that the main stream attends to stay."""
        return self if adapter.config.main_attends_streams else replace(self, stream_rows="none")

    def check(self) -> None:
        """Raise UserError for a back end or a dtype that does not exist, or what the back end lacks."""
        name = self.backend
        if name is None:
            return
        if name not in DTYPES:
            raise UserError(f"unknown back end '{name}' (known: {', '.join(BACKENDS)})")
        if self.dtype not in (None, *DTYPES[name]):
            known = ", ".join(DTYPES[name])
            raise UserError(f"back end '{name}' does not compute in {self.dtype} (known: {known})")
        if self.compute_units is not None and name not in WITH_UNITS:
            raise UserError(f"--compute-units is for back ends 'coreml' and 'coreai', not for '{name}'")
        if self.device is not None and name != "reference":
            raise UserError(f"--device is for back end 'reference', not for '{name}'")
        if self.quantize is not None and name != "mlx":
            raise UserError(f"back end '{name}' computes with the bundle's weights: leave --quantize out")
        if self.kv_bits is not None and name != "mlx":
            raise UserError(f"back end '{name}' keeps keys and values as they are: leave --kv-bits out")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """`--backend` of commands that run on MLX unless told otherwise."""
    parser.add_argument(
        "--backend", choices=SERVING_BACKENDS, default="mlx", help="what runs the bundle (default: mlx)"
    )


@dataclass(frozen=True)
class DraftSettings:
    """What is drafted for a call. Nothing said: what `ss-bench tune` chose, else the whole tree."""

    plain: bool = setting(False, help="no drafts: one token per call")
    nodes: int | None = setting(parse=positive, help="tree nodes per call (default: the bundle's)")
    shape: str | None = setting(choices=SHAPES, help="how the tree is grown (default: best-first)")
    tree_top_k: int = setting(3, parse=positive, metavar="K", help="children per node of a k-ary tree")
    lookup: bool = setting(
        False, help="prompt lookup: n-grams of prompt and output compete for the tree's nodes"
    )

    def __post_init__(self) -> None:
        if self.plain and self.nodes not in (None, 1):
            raise UserError("--plain is one node per call; leave --nodes out")

    def within(self, adapter: BundledAdapter) -> DraftSettings:
        """What was said for a bundle's adapters, for the base alone, which takes fewer nodes."""
        if has_streams(adapter) or not self.nodes:
            return self
        return replace(self, nodes=min(self.nodes, adapter.num_nodes))

    @property
    def said(self) -> bool:
        """Whether drafts are asked for, so that no tuning decides."""
        return bool(self.plain or self.nodes or self.shape or self.lookup)

    def drafter(self, adapter: BundledAdapter, bias: BigramBias | None) -> Drafter:
        """The draft asked for, or the bundle's whole tree. UserError for more nodes than it takes."""
        if not has_streams(adapter) and not self.lookup:
            return Drafter(1)
        nodes = 1 if self.plain else (self.nodes or adapter.num_nodes)
        if nodes > adapter.num_nodes:
            raise UserError(
                f"--nodes {nodes}: '{adapter.app}' was made for at most {adapter.num_nodes} nodes"
            )
        lookup = PromptLookup() if self.lookup and nodes > 1 else None
        streams = has_streams(adapter) or not lookup
        shape = self.shape or SHAPES[0]
        return Drafter(nodes, shape, self.tree_top_k, bias, lookup=lookup, use_streams=streams)


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen; the names are mlx-lm's."""

    temp: float = setting(0.0, metavar="T", group=SAMPLING, help="above 0: sample (default: 0, greedy)")
    top_p: float | None = setting(
        metavar="P", group=SAMPLING, help="sample from the likeliest tokens that reach P together"
    )
    top_k: int | None = setting(metavar="K", group=SAMPLING, help="sample from the K likeliest tokens")
    min_p: float | None = setting(
        metavar="P", group=SAMPLING, help="drop tokens below P times the likeliest one's probability"
    )
    seed: int | None = setting(
        group=SAMPLING, help="the same seed gives the same text, with drafts or without"
    )
    repetition_penalty: float | None = setting(group=SAMPLING, help="mlx-lm's repetition penalty")
    presence_penalty: float | None = setting(group=SAMPLING, help="mlx-lm's presence penalty")
    frequency_penalty: float | None = setting(group=SAMPLING, help="mlx-lm's frequency penalty")
    lossy_typical: float | None = setting(
        metavar="EPSILON",
        group=SAMPLING,
        help="LOSSY: accept drafts that are merely typical (Medusa's rule, e.g. 0.09; delta is its square "
        "root); changes the text",
    )

    def sampler(self) -> Sampler | None:
        """The sampler; None is greedy. Raises UserError for values that cannot be."""
        names = ("top_p", "top_k", "min_p", "seed")
        said = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        penalties = {
            "repetition": self.repetition_penalty,
            "presence": self.presence_penalty,
            "frequency": self.frequency_penalty,
        }
        return build_sampler(self.temp, said, penalties, self.lossy_typical)


def functions_of(backend: str, adapter: BundledAdapter) -> StepFunctions | None:
    """What a back end runs of the adapter; None: it runs no functions, or the bundle has none for it."""
    return getattr(adapter, FUNCTION_BACKENDS[backend]) if backend in FUNCTION_BACKENDS else None


def default_dtype(backend: str) -> str:
    """Half precision where the hardware has it; MLX on a CPU is faster and exact in float32."""
    if backend == "mlx" and sys.platform != "darwin":
        return "float32"
    return DTYPES[backend][0]
