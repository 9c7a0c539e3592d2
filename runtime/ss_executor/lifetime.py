"""When values of a program die, and where an update may therefore reuse memory.

A state of tens of megabytes is read, changed in a few rows and written back many times per call.
Functional semantics ask for a copy each time; the analysis here finds the updates whose input
nobody can look at afterwards, so they may write into it.
"""

from collections.abc import Mapping

from .graph import Block, Operation
from .registry import Call, OpDefinition

_READ, _WRITE = "read_state", ("write_state", "coreml_update_state")
_FOREIGN = "foreign"  # memory of a constant, of an input or of unknown origin: never written


def last_uses(block: Block) -> dict[str, int]:
    """Value name -> index of the last top-level operation that reads it; outputs never die."""
    last = {name: i for i, operation in enumerate(block.operations) for name in operation.names()}
    last.update(dict.fromkeys(block.outputs, len(block.operations)))
    return last


def mark_reusable_memory(
    block: Block,
    states: set[str],
    constants: set[str],
    calls: Mapping[int, Call],
    registry: Mapping[str, OpDefinition],
) -> None:
    """Set `in_place` of slice_update calls and `owned` of state writes of a function body.

    Every value has a set of buffers it may live in. A buffer may be overwritten when no value
    that is read later lives in it and every state that holds it is written before it is read.
    """
    nested = [op for operation in block.operations for b in operation.blocks for op in b.walk()]
    if any(operation.type in (_READ, *_WRITE) for operation in nested):
        return
    analysis = _Analysis(block, states, constants, registry)
    for index, operation in enumerate(block.operations):
        if index in calls:
            analysis.visit(index, operation, calls[index])


class _Analysis:
    def __init__(self, block, states, constants, registry):
        self.block, self.registry = block, registry
        self.last = last_uses(block)
        self.buffers: dict[str, frozenset] = {
            name: frozenset([_FOREIGN]) for name in constants | {n for n, _ in block.inputs}
        }
        self.contents = {name: frozenset([("state", name)]) for name in states}

    def visit(self, index: int, operation: Operation, call: Call) -> None:
        """Decide about one operation and note where its results live."""
        inputs = [self.buffers.get(name, frozenset([_FOREIGN])) for name in operation.names()]
        results = [name for name, _ in operation.outputs]
        lives_in = frozenset([("value", index)])
        if operation.type == _READ:
            lives_in = self.contents[operation.inputs["input"][0]]
        elif operation.type in _WRITE:
            lives_in = self.write(index, operation, call)
        elif operation.type == "slice_update":
            source = operation.inputs["x"][0]
            call.in_place = isinstance(source, str) and self.reusable(index, source)
            if call.in_place:
                lives_in = self.buffers[source]
        elif operation.blocks:
            lives_in = frozenset().union([_FOREIGN], *inputs)
        elif self.registry[operation.type].view:
            lives_in = lives_in.union(*inputs)
        self.buffers.update(dict.fromkeys(results, lives_in))

    def write(self, index: int, operation: Operation, call: Call) -> frozenset:
        """A state takes a value over when no constant, input or other state shares its memory."""
        state = operation.inputs["state" if "state" in operation.inputs else "input"][0]
        value = operation.inputs["value" if "value" in operation.inputs else "data"][0]
        held = self.buffers.get(value, frozenset([_FOREIGN]))
        others = [content for name, content in self.contents.items() if name != state]
        foreign_states = {("state", name) for name in self.contents if name != state}
        call.owned = not (
            _FOREIGN in held or held & foreign_states or any(held & content for content in others)
        )
        self.contents[state] = held if call.owned else frozenset([("copy", index)])
        return held

    def reusable(self, index: int, source: str) -> bool:
        """Whether operation `index` may overwrite the memory of its input `source`."""
        held = self.buffers.get(source, frozenset([_FOREIGN]))
        if _FOREIGN in held or self.last[source] != index:
            return False
        alive = (
            name
            for name, buffers in self.buffers.items()
            if name != source and buffers & held and self.last.get(name, -1) > index
        )
        if next(alive, None) is not None:
            return False
        return all(
            self.overwritten(index, name) for name, content in self.contents.items() if content & held
        )

    def overwritten(self, index: int, state: str) -> bool:
        """Whether the next thing that happens to a state after `index` is a write."""
        for operation in self.block.operations[index + 1 :]:
            if state in operation.names():
                return operation.type in _WRITE
        return False
