"""A function's description in fewer bytes: equal small constants once, short names of intermediate values.

Without it half of a small package's `model.mlmodel` is names and the same axes, shapes and flags written
for every operation anew. Names that say something stay: inputs, outputs, states, stored weights.
"""

from __future__ import annotations

import re
from itertools import count

from coremltools.proto import MIL_pb2

# What coremltools calls a parameter that was given as a plain value: `linear_5_bias_0`.
GENERATED = re.compile(r"[a-z_]+_\d+_[a-z_]+_0$")


def compact(function: MIL_pb2.Function) -> None:
    """Rewrite the function in place; operations, their order and all values stay what they are."""
    for name in sorted(function.block_specializations):
        block = function.block_specializations[name]
        kept = {feature.name for feature in function.inputs} | _fixed_names(block)
        numbers = (number for number in count() if f"v{number}" not in kept)
        _rewrite(block, kept, {}, {}, numbers)


def _fixed_names(block: MIL_pb2.Block) -> set[str]:
    """Outputs, inputs of nested blocks, and values whose bytes stand in the weight file."""
    fixed = set(block.outputs) | {value.name for value in block.inputs}
    for operation in block.operations:
        if _is_weight(operation):
            fixed.update(value.name for value in operation.outputs)
        for nested in operation.blocks:
            fixed |= _fixed_names(nested)
    return fixed


def _is_weight(operation: MIL_pb2.Operation) -> bool:
    """Whether a constant stands in the weight file under a name that the builder gave it."""
    if operation.type.startswith("constexpr_"):
        return True
    stored = operation.type == "const" and operation.attributes["val"].HasField("blobFileValue")
    return stored and not GENERATED.match(operation.outputs[0].name)


def _rewrite(block, kept: set[str], renamed: dict[str, str], constants: dict[bytes, str], numbers) -> None:
    """renamed: old → new name of the values in sight; constants: value → name of its constant."""
    operations = []
    for operation in block.operations:
        name = operation.outputs[0].name if operation.outputs else None
        if operation.type == "const" and name not in kept:
            value = operation.attributes["val"].SerializeToString(deterministic=True)
            if value in constants:
                renamed[name] = constants[value]
                continue
            _rename(operation, kept, renamed, numbers)
            constants[value] = renamed[name]
        else:
            _rename(operation, kept, renamed, numbers)
        for nested in operation.blocks:
            # What a nested block defines is not in sight outside it.
            _rewrite(nested, kept, dict(renamed), dict(constants), numbers)
        operations.append(MIL_pb2.Operation.FromString(operation.SerializeToString()))
    del block.operations[:]
    block.operations.extend(operations)


def _rename(operation: MIL_pb2.Operation, kept: set[str], renamed: dict[str, str], numbers) -> None:
    for name in operation.inputs:
        for binding in operation.inputs[name].arguments:
            if binding.HasField("name"):
                binding.name = renamed.get(binding.name, binding.name)
    for value in operation.outputs:
        if value.name not in kept:
            renamed[value.name] = f"v{next(numbers)}"
            value.name = renamed[value.name]
    if operation.outputs and "name" in operation.attributes:
        operation.attributes["name"].immediateValue.tensor.strings.values[:] = [operation.outputs[0].name]
