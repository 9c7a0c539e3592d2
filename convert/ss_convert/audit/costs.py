"""What one call of a function costs: FLOPs, bytes of weights and states that move, rows per layer group."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from ss_convert.audit.devices import Device
from ss_convert.audit.view import Stored, View, bytes_of, size_of
from ss_executor.graph import Operation

HEAVY = ("linear", "matmul", "conv", "conv_transpose", "einsum", "scaled_dot_product_attention")
LAYER = re.compile(r"layers_(\d+)_")
# What belongs to an adapter, by the names that the builder gives its constants.
ADAPTER_KINDS = (
    ("LoRA", re.compile(r"^lora_")),
    ("stream parts", re.compile(r"^stream_")),
    ("pruning head", re.compile(r"^pruning_")),
)
KINDS = (
    *ADAPTER_KINDS,
    ("embedding and head", re.compile(r"^(embed|head|positions)")),
    ("attention", re.compile(r"_attn_[a-z]+_(weight|bias)")),
    ("feed-forward", re.compile(r"_mlp_[a-z0-9]+_(weight|bias)")),
    ("norms", re.compile(r"norm")),
)
OTHER_KIND = "tables and masks"
# Operations per element of what is no product: exponentials and square roots count as one.
PER_ELEMENT = {"softmax": 5, "layer_norm": 6, "silu": 4, "gelu": 8, "reduce_argmax": 1, "rsqrt": 2}
NO_ARITHMETIC = (
    "slice_by_size", "slice_by_index", "reshape", "transpose", "concat", "expand_dims", "squeeze", "tile",
    "gather", "cast", "read_state", "write_state", "coreml_update_state", "slice_update", "identity",
    "split",
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """One call. flops; weight_bytes read as stored; state_bytes read and written; activation_bytes:
    results written, an upper bound since engines fuse; rows: layer group → rows of its products."""

    flops: int
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    rows: dict[str, int]

    @property
    def intensity(self) -> float:
        """FLOPs per byte of weights and states."""
        return self.flops / max(1, self.weight_bytes + self.state_bytes)

    def seconds(self, device: Device) -> dict[str, float]:
        """memory and compute time if each were alone, and the estimate: the longer one and the overhead."""
        memory = (self.weight_bytes + self.state_bytes) / (device.bandwidth * 1e9)
        compute = self.flops / (device.compute * 1e12)
        return {"memory": memory, "compute": compute, "step": max(memory, compute) + device.overhead / 1e3}


def costs(view: View) -> Costs:
    """Costs of one call of the function."""
    state_bytes = activation_bytes = flops = 0
    from_state = set(view.function.states)
    for operation in view.operations:
        flops += operation_flops(view, operation)
        inputs = set(operation.names())
        if operation.type in ("read_state", "slice_update", "coreml_update_state"):
            from_state.update(name for name, _ in operation.outputs)
        if operation.type.startswith("slice_by") and inputs & from_state:
            state_bytes += sum(bytes_of(type_) for _, type_ in operation.outputs)
        elif operation.type == "slice_update":
            state_bytes += bytes_of(view.argument(operation, "update"))
        elif operation.type not in ("read_state", "coreml_update_state", "write_state"):
            activation_bytes += sum(bytes_of(type_) for _, type_ in operation.outputs)
    return Costs(flops, weight_traffic(view), state_bytes, activation_bytes, rows_by_group(view))


def operation_flops(view: View, operation: Operation) -> int:
    """Multiplications and additions of one operation, from the shapes in the file."""
    result = sum(size_of(type_) for _, type_ in operation.outputs)
    if operation.type == "linear":
        return 2 * result * (view.argument(operation, "weight").shape[1] or 1)
    if operation.type == "matmul":
        x = view.argument(operation, "x")
        transposed = bool(view.value(operation, "transpose_x"))
        return 2 * result * (x.shape[-2 if transposed and len(x.shape) > 1 else -1] or 1)
    if operation.type in ("conv", "conv_transpose"):
        weight = view.argument(operation, "weight").shape
        inner = size_of(view.argument(operation, "weight")) // (weight[0] or 1)
        moved = result if operation.type == "conv" else size_of(view.argument(operation, "x"))
        return 2 * moved * inner
    if operation.type == "scaled_dot_product_attention":
        query, key = view.argument(operation, "query"), view.argument(operation, "key")
        return 4 * size_of(query) * (key.shape[-2] or 1)
    if operation.type == "einsum":
        return 2 * result * (view.argument(operation, "values").shape[-1] or 1)
    return 0 if operation.type in NO_ARITHMETIC else result * PER_ELEMENT.get(operation.type, 1)


def weight_traffic(view: View) -> int:
    """Bytes of constants that one call reads; of a table that is gathered from, the rows alone."""
    whole, rows = {}, 0
    for operation in view.operations:
        for key in operation.inputs:
            found = view.weight(operation, key)
            if found is None:
                continue
            if operation.type == "gather" and key == "x":
                share = size_of(operation.outputs[0][1]) / max(1, size_of(found.type))
                rows += int(found.num_bytes * min(1.0, share))
            else:
                whole[found.pieces] = found.num_bytes
    return sum(whole.values()) + rows


def rows_by_group(view: View) -> dict[str, int]:
    """Rows of the products with weights: consecutive layers of equal rows are one group, `head` another."""
    by_layer: dict[int, int] = defaultdict(int)
    head = 0
    for operation in view.operations:
        if operation.type not in ("linear", "conv"):
            continue
        weight, result = view.weight(operation, "weight"), operation.outputs[0][1]
        if weight is None or weight.operation is None and not weight.name:
            continue
        rows = size_of(result) // max(1, weight.type.shape[0] or 1)
        if match := LAYER.search(weight.name):
            by_layer[int(match[1])] = max(by_layer[int(match[1])], rows)
        elif weight.name.startswith(("embed", "head")):
            head += rows
    groups: dict[str, int] = {}
    first = None
    layers = sorted(by_layer)
    for index, layer in enumerate(layers):
        first = layer if first is None else first
        ends = index == len(layers) - 1 or by_layer[layers[index + 1]] != by_layer[layer]
        if ends:
            groups[f"layers {first}–{layer}" if first != layer else f"layer {layer}"] = by_layer[layer]
            first = None
    return groups | ({"head": head} if head else {})


def kind_of(constant: Stored) -> str:
    """What a constant is, by its name."""
    return next((kind for kind, pattern in KINDS if pattern.search(constant.name)), OTHER_KIND)


def bytes_by_kind(views: list[View]) -> dict[str, int]:
    """Stored bytes of all functions' constants, each counted once, by kind."""
    kinds: dict[str, int] = defaultdict(int)
    seen: set = set()
    for view in views:
        for constant in view.constants():
            for piece in constant.pieces:
                if piece.key not in seen:
                    seen.add(piece.key)
                    kinds[kind_of(constant)] += bytes_of(piece.type)
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def is_of_adapter(constant: Stored) -> bool:
    """Whether a constant is a tensor of an adapter."""
    return any(pattern.search(constant.name) for _, pattern in ADAPTER_KINDS)


def blob_bytes(view: View) -> dict[tuple, tuple[int, bool]]:
    """Key → bytes of every piece of the weight file that a function reads, and whether an adapter's."""
    return {
        piece.key: (bytes_of(piece.type), is_of_adapter(constant))
        for constant in view.constants()
        for piece in constant.pieces
        if piece.key[0] == "blob"
    }
