"""Placement hazards: rules about what leaves an engine, fails on it or is slow there, with their sources.

No device has confirmed them here: they are leads from documentation, from public reports, and two from
what coremltools itself refuses when it converts; each names where it comes from, and says so where reports
disagree. `audit --engine` chooses which apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from ss_convert.audit.costs import HEAVY
from ss_convert.audit.view import View, size_of

Found = tuple[str, str, str]  # operation type, its name, what is wrong there
FAILS, LEAVES, SLOWER = "fails", "leaves the engine", "slower"
CPU_OPS = ("gather", "gather_along_axis", "gather_nd", "topk", "argsort", "reduce_argmax",
           "reduce_argmin", "scatter", "scatter_along_axis", "scatter_nd", "non_zero",
           "non_maximum_suppression")  # fmt: skip
SCATTER = ("scatter", "scatter_along_axis", "scatter_nd")
MAX_OUTPUTS, MAX_FILE, MAX_UPDATE_ROWS, STATE_MULTIPLE = 16384, 1_000_000_000, 128, 32
LARGE, MAX_RANK = 1024, 5


@dataclass(frozen=True)
class Rule:
    """engines it applies to; effect; what it says; source; find: hazards in one function."""

    name: str
    engines: tuple[str, ...]
    effect: str
    text: str
    source: str
    find: Callable[[View], Iterator[Found]]


@dataclass(frozen=True)
class Hazard:
    """A rule that applies to one place of a package."""

    rule: str
    effect: str
    function: str
    operation: str
    where: str
    detail: str
    source: str

    def to_dict(self) -> dict:
        return asdict(self)


def hazards(views: list[View], engine: str, weight_bytes: int) -> list[Hazard]:
    """Everything the rules find for an engine (`ane` or `gpu`) in a package's functions."""
    found = []
    for rule in RULES:
        if engine not in rule.engines:
            continue
        for view in views:
            for operation, where, detail in rule.find(view):
                found.append(
                    Hazard(
                        rule.name, rule.effect, view.function.name, operation, where, detail, rule.source
                    )
                )
    if weight_bytes > MAX_FILE and engine == "ane":
        detail = f"the weight file has {weight_bytes / 1e9:.2f} GB"
        source = (
            "Anemll/Anemll issue 28: 1 GB on iOS 18, 2 GB on macOS; apple/coremltools pull request 2593 "
            "quotes the ANE compiler's own limit of 2147483648 bytes"
        )
        found.append(Hazard("large-file", LEAVES, "all", "file", "weight.bin", detail, source))
    return found


def _middle(view: View) -> range:
    """Indices of the operations between the first and the last product with a weight."""
    heavy = [
        i
        for i, op in enumerate(view.operations)
        if op.type in HEAVY and view.weight(op, "weight") is not None
    ]
    return range(heavy[0], heavy[-1]) if heavy else range(0)


def _cpu_in_the_middle(view: View) -> Iterator[Found]:
    middle = _middle(view)
    for index in middle:
        operation = view.operations[index]
        if operation.type in CPU_OPS and operation.type not in SCATTER:
            yield operation.type, operation.label, "runs on the CPU between products: two transfers"


def _scatters(view: View) -> Iterator[Found]:
    for operation in view.operations:
        if operation.type in SCATTER:
            yield operation.type, operation.label, "an update by index vector"


def _int4_blocks(view: View) -> Iterator[Found]:
    for name, constant in view.stored.items():
        if constant.operation != "constexpr_blockwise_shift_scale":
            continue
        data, scale = (next((p for p in constant.pieces if p.type.dtype in kinds), None)
                       for kinds in (("int4", "uint4"), ("float16", "float32")))  # fmt: skip
        if data is not None and scale is not None and (scale.type.shape[1:2] or (1,))[0] != 1:
            yield constant.operation, name, f"int4 with {scale.type.shape[1]} blocks per channel"


def _state_width(view: View) -> Iterator[Found]:
    for name, state in view.function.states.items():
        if state.shape and state.shape[-1] % STATE_MULTIPLE:
            yield "state", name, f"last dimension {state.shape[-1]} is no multiple of {STATE_MULTIPLE}"


def _many_states(view: View) -> Iterator[Found]:
    if len(view.function.states) > 2:
        yield "state", ", ".join(view.function.states), f"{len(view.function.states)} states"


def _linears(view: View) -> Iterator[Found]:
    names = [op.label for op in view.operations if op.type == "linear"]
    if names:
        yield "linear", names[0], f"{len(names)} products as linear, not as 1×1 convolution"


def _convolutions(view: View) -> Iterator[Found]:
    names = [
        op.label
        for op in view.operations
        if op.type == "conv" and set(view.argument(op, "weight").shape[2:]) == {1}
    ]
    if names:
        yield "conv", names[0], f"{len(names)} products as 1×1 convolution, not as linear"


def _fused_attention(view: View) -> Iterator[Found]:
    for operation in view.operations:
        if operation.type == "scaled_dot_product_attention":
            yield operation.type, operation.label, "the fused attention operation"


def _explicit_attention(view: View) -> Iterator[Found]:
    names = [op.label for op in view.operations if op.type == "softmax"]
    fused = any(op.type == "scaled_dot_product_attention" for op in view.operations)
    if names and not fused:
        yield "softmax", names[0], f"{len(names)} times softmax between products"


def _infinite_constants(view: View) -> Iterator[Found]:
    for constant in view.constants():
        kind = constant.pieces[0].type
        if constant.operation is None and kind.dtype in ("float16", "float32"):
            values = constant.pieces[0].load()
            if size_of(kind) and not np.all(np.isfinite(values)):
                yield "const", constant.name, "holds values that are not finite"


def _wide_heads(view: View) -> Iterator[Found]:
    for operation in view.operations:
        weight = view.argument(operation, "weight") if operation.type in ("linear", "conv") else None
        if weight is not None and (weight.shape[0] or 0) > MAX_OUTPUTS:
            yield operation.type, operation.label, f"{weight.shape[0]} outputs in one product"


def _update_rows(view: View) -> Iterator[Found]:
    for operation in view.operations:
        if operation.type == "slice_update" and view.value(operation, "begin") is None:
            rows = max((view.argument(operation, "update").shape or (1,))[-2:-1] or (1,))
            if rows >= MAX_UPDATE_ROWS:
                yield operation.type, operation.label, f"{rows} rows at a position known at run time"


def _full_precision(view: View) -> Iterator[Found]:
    middle = _middle(view)
    for index in middle:
        operation = view.operations[index]
        if any(type_.dtype == "float32" for _, type_ in operation.outputs):
            yield operation.type, operation.label, "computes in float32"


def _unknown_shapes(view: View) -> Iterator[Found]:
    for name, feature in view.function.inputs.items():
        if None in feature.shape:
            yield "input", name, f"shape {feature.shape} is not fixed"


def _singleton_last_axis(view: View) -> Iterator[Found]:
    for operation in view.operations:
        for name, type_ in operation.outputs:
            if len(type_.shape) > 2 and type_.shape[-1] == 1 and size_of(type_) >= LARGE:
                yield operation.type, name, f"shape {type_.shape}: the last axis is padded to 64 bytes"


def _chained_compression(view: View) -> Iterator[Found]:
    for operation in view.function.block.walk():
        if operation.type.startswith("constexpr_"):
            for arguments in operation.inputs.values():
                for argument in arguments:
                    source = view.stored.get(argument) if isinstance(argument, str) else None
                    if source is not None and source.operation:
                        yield operation.type, operation.label, f"takes the result of {source.operation}"


def _high_rank(view: View) -> Iterator[Found]:
    for operation in view.operations:
        for name, type_ in operation.outputs:
            if len(type_.shape) > MAX_RANK:
                yield operation.type, name, f"rank {len(type_.shape)}"


ANE, GPU = ("ane",), ("gpu",)
BOTH = ("ane", "gpu")
RULES = (
    Rule("cpu-op", ANE, LEAVES, "top-k, gather, argmax run on the CPU: keep them at the ends",
         "apple/coremltools issue 1103 (gather as slow on all units as on the CPU); apple/coreai-torch "
         "issues 66 (a top-k beside the ANE: 1.75 ms) and 116 (argmax wrong off the CPU)",
         _cpu_in_the_middle),
    Rule("scatter", BOTH, FAILS, "scatter by index vector into a state",
         "run with coremltools 9.0: does not convert; packages of others may hold it", _scatters),
    Rule("int4-blocks", ANE, LEAVES, "int4 per block falls back to the CPU",
         "coremltools issue 2510", _int4_blocks),
    Rule("state-width", ANE, FAILS, "a state's last dimension must be a multiple of 32",
         "coremltools issue 2631", _state_width),
    Rule("many-states", ANE, FAILS, "three or more states compile and then fail at predict",
         "CoreML-LLM docs/MLSTATE_PATTERN.md", _many_states),
    Rule("linear", ANE, SLOWER, "1×1 convolutions on (B, C, 1, S) instead of linear",
         "Apple, Deploying Transformers on the Apple Neural Engine (2022)", _linears),
    Rule("conv", GPU, SLOWER, "linear instead of 1×1 convolutions",
         "Apple, On Device Llama 3.1 with Core ML (2024): linear layers on the GPU", _convolutions),
    Rule("fused-attention", ANE, LEAVES, "explicit products and softmax instead of the fused operation",
         "vx-lang/Vx issue 437 (compute plans: fp16 attention below about two million elements goes to the "
         "CPU); kasper0406/stablehlo-coreml pull request 110 saw it on the ANE: reports disagree",
         _fused_attention),
    Rule("explicit-attention", GPU, SLOWER, "the fused attention operation instead of products and softmax",
         "Apple, On Device Llama 3.1 with Core ML (2024)", _explicit_attention),
    Rule("not-finite", BOTH, FAILS, "masks with a finite value (-1e4), never -inf",
         "apple/coremltools pull request 2669, cactus-compute/cactus pull request 734: rows that are "
         "masked whole become not-a-number in fp16", _infinite_constants),
    Rule("wide-head", ANE, LEAVES, "heads of big vocabularies split into parts of at most 16384",
         "sbryngelson/ANEForge pull request 240: no dimension above 16384 on A13 to A15 and an M2 Pro, "
         "above 65536 from A16 on", _wide_heads),
    Rule("update-rows", BOTH, FAILS, "slice_update at a runtime position works at 32 rows, failed at 128",
         "Anemll issue 27", _update_rows),
    Rule("float32", ANE, LEAVES, "the ANE computes in fp16 only",
         "coremltools documentation, Typed Execution", _full_precision),
    Rule("unknown-shape", ANE, LEAVES, "inputs of a fixed shape",
         "coremltools documentation, Flexible Input Shapes", _unknown_shapes),
    Rule("singleton-axis", ANE, SLOWER, "a last axis of size 1 takes 32 times its memory",
         "Apple, Deploying Transformers on the Apple Neural Engine (2022)", _singleton_last_axis),
    Rule("rank", BOTH, FAILS, "tensors of at most five axes",
         "coremltools' own check: Core ML only supports tensors with rank <= 5", _high_rank),
    Rule("chained-compression", BOTH, FAILS,
         "one compression per weight: a table with per-channel scales crashes on macOS 26",
         "coremltools pull request 2688", _chained_compression),
)  # fmt: skip
