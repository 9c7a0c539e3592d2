"""A prepared function: constants decoded, operations looked up, lifetimes known; then run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from . import ops  # noqa: F401  (fills the registry)
from .dtypes import BY_NAME, round_to_half
from .errors import ExecutorError, UnknownOpError
from .graph import Block, Constant, Feature, Function, Operation, TensorType
from .lifetime import last_uses, mark_reusable_memory
from .registry import REGISTRY, Call, OpDefinition

# Values of a constant from which on it is large.
LARGE = 1 << 16
_KINDS = {"f": "float", "i": "integer", "u": "integer", "b": "bool"}


class State(dict):
    """State name -> array. Programs of one package with equal states may take turns on it.

    fp16 states are float32 arrays (holding fp16 values with dtype float16). Running a
    program changes the arrays in place; use `copy` to keep what they hold.
    """

    def copy(self) -> State:
        """An independent copy, arrays included."""
        return State({name: np.array(value) for name, value in self.items()})


class StateHandle:
    """What the state input of a function is bound to while the function runs."""

    def __init__(self, name: str, state: State):
        self.name, self.state = name, state

    def read(self) -> np.ndarray:
        """The value at this time; valid until memory is reused, which lifetimes rule out."""
        return self.state[self.name]

    def write(self, value: np.ndarray, owned: bool) -> None:
        """Store a value; `owned` says that its memory may be kept instead of copied."""
        keep = owned and value.flags.writeable and value.flags.c_contiguous
        self.state[self.name] = value if keep else np.array(value, order="C")


@dataclass
class Step:
    """One operation ready to run: constants bound, variable parameters by name.

    decoded: parameters whose constants are decoded for every call.
    """

    definition: OpDefinition
    call: Call
    fixed: dict[str, object]
    variable: list[tuple[str, str]]
    variable_lists: list[tuple[str, list[str]]]
    results: list[tuple[str, TensorType, np.dtype, bool]]
    dead: list[str] = field(default_factory=list)
    decoded: dict[str, Constant | _Folded] = field(default_factory=dict)


@dataclass
class PreparedBlock:
    """A nested block: names of its inputs, steps, names of its outputs."""

    inputs: list[str]
    steps: list[Step]
    outputs: list[str]


class Program:
    """A function of a package, prepared for one dtype. See Package.program.

    weights: where decoded constants are kept, shared by programs; None: large ones are not kept.
    """

    def __init__(self, function: Function, dtype: str, weights: dict[tuple, np.ndarray] | None):
        self.function, self.dtype = function, dtype
        self._keeps_large = weights is not None
        self._weights = {} if weights is None else weights
        self._folded: dict[str, Constant | _Folded] = {}
        self._constants: dict[str, object] = {}
        _refuse_unknown(function)
        self._block = self._prepare_block(function.block)
        for name in self._block.outputs:
            self._bind_constant(name)
        self._set_lifetimes()

    @property
    def name(self) -> str:
        return self.function.name

    def make_state(self) -> State:
        """All states of the function as zeros."""
        return State(
            {
                name: np.zeros(feature.shape, BY_NAME[feature.dtype].storage)
                for name, feature in self.function.states.items()
            }
        )

    def predict(
        self, inputs: Mapping[str, np.ndarray], state: State | None = None
    ) -> dict[str, np.ndarray]:
        """Run once. inputs: one array per input feature; state: from make_state, changed in place.

        fp16 outputs are float16 arrays with dtype float16 and float32 arrays otherwise.
        Raises ExecutorError for wrong inputs or states, or when an operation fails.
        """
        values: dict[str, object] = self._checked_inputs(inputs)
        values.update(self._constants)
        values.update(self._checked_states(state))
        with np.errstate(all="ignore"):
            results = self._run(self._block, values)
        return {
            name: self._output(name, value)
            for name, value in zip(self._block.outputs, results, strict=True)
        }

    # ---- preparation -------------------------------------------------------------------------

    def _prepare_block(self, block: Block) -> PreparedBlock:
        steps = []
        for operation in block.operations:
            if operation.type == "const":
                self._folded[operation.label] = operation.inputs["val"][0]
            elif operation.type.startswith("constexpr_"):
                self._fold(operation)
            else:
                steps.append(self._prepare_step(operation))
        return PreparedBlock([name for name, _ in block.inputs], steps, list(block.outputs))

    def _prepare_step(self, operation: Operation) -> Step:
        definition = REGISTRY[operation.type]
        call = self._call(operation)
        call.blocks = [self._prepare_block(block) for block in operation.blocks]
        for block in operation.blocks:
            for name in block.outputs:
                self._bind_constant(name)
        step = Step(definition, call, {}, [], [], self._results(operation, definition))
        for key, arguments in operation.inputs.items():
            if (source := self._decoded_later(key, arguments, definition)) is not None:
                step.decoded[key] = source
                continue
            for argument in arguments:
                self._bind_constant(argument)
            names = [self._value_name(argument) for argument in arguments]
            many = key in definition.tuples or len(names) > 1
            if all(name in self._constants for name in names):
                bound = [self._constants[name] for name in names]
                step.fixed[key] = bound if many else bound[0]
            elif many:
                step.variable_lists.append((key, names))
            else:
                step.variable.append((key, names[0]))
        return step

    def _call(self, operation: Operation) -> Call:
        types = tuple(type_ for _, type_ in operation.outputs)
        return Call(operation.type, operation.label, types, self.function.opset, self.dtype)

    def _results(
        self, operation: Operation, definition: OpDefinition
    ) -> list[tuple[str, TensorType, np.dtype, bool]]:
        """Per output: name, type, array type, whether it must be rounded to fp16."""
        results = []
        for name, type_ in operation.outputs:
            if type_.dtype not in BY_NAME:
                raise ExecutorError(
                    f"{self._where(operation.type, name)}: values of {type_.dtype} are not supported"
                )
            half = type_.dtype == "float16" and self.dtype == "float16"
            rounded = half and not definition.exact
            results.append((name, type_, BY_NAME[type_.dtype].storage, rounded))
        return results

    @staticmethod
    def _value_name(argument: str | Constant) -> str:
        # A constant bound directly to a parameter has no name; its key serves as one.
        return argument if isinstance(argument, str) else f"constant:{argument.key}"

    def _bind_constant(self, argument: str | Constant) -> None:
        """Decode a constant that an operation (or an output) needs, once per package."""
        name = self._value_name(argument)
        source = argument if isinstance(argument, Constant) else self._folded.get(name)
        if name not in self._constants and source is not None:
            self._constants[name] = self._decode(source, keep=True)

    def _decoded_later(self, key: str, arguments: list, definition: OpDefinition):
        """The large constant behind a parameter, where such are not kept; None otherwise."""
        if self._keeps_large or len(arguments) != 1 or key in definition.tuples or definition.view:
            return None
        argument = arguments[0]
        source = argument if isinstance(argument, Constant) else self._folded.get(argument)
        return source if source is not None and source.size >= LARGE else None

    def _decode(self, source: Constant | _Folded, keep: bool) -> object:
        """Array (read only) or string of a constant. Only values worth sharing are kept."""
        found = self._weights.get(source.key)
        if found is not None:
            return found
        value = source.load()
        if isinstance(value, str):
            return value
        if value.dtype == np.float16:
            value = value.astype(np.float32)
        value.flags.writeable = False
        if keep:
            self._weights[source.key] = value
        return value

    def _fold(self, operation: Operation) -> None:
        """Register the outputs of a constexpr operation as constants, computed when needed."""
        sources = {}
        for key, (argument, *_) in operation.inputs.items():
            source = self._folded.get(argument) if isinstance(argument, str) else argument
            if source is None:
                where = self._where(operation.type, operation.label)
                raise ExecutorError(f"{where}: parameter '{key}' is not a constant")
            sources[key] = source
        parts = tuple(sorted((key, source.key) for key, source in sources.items()))
        for index, (name, _) in enumerate(operation.outputs):
            key = (operation.type, self.dtype, index, parts)
            self._folded[name] = _Folded(key, self, operation, sources, index)

    def _set_lifetimes(self) -> None:
        block = self.function.block
        last = last_uses(block)
        positions = [
            index
            for index, operation in enumerate(block.operations)
            if operation.type != "const" and not operation.type.startswith("constexpr_")
        ]
        steps = self._block.steps
        for index, step in zip(positions, steps, strict=True):
            used = {name for name in block.operations[index].names() if last.get(name) == index}
            unused = {name for name, *_ in step.results if name not in last}
            step.dead = sorted((used | unused) - self._constants.keys())
        calls = dict(zip(positions, (step.call for step in steps), strict=True))
        states = set(self.function.states)
        mark_reusable_memory(block, states, set(self._constants), calls, REGISTRY)

    # ---- running -----------------------------------------------------------------------------

    def _run(self, block: PreparedBlock, values: dict[str, object]) -> list:
        for step in block.steps:
            self._run_step(step, values)
            for name in step.dead:
                values.pop(name, None)
        return [values[name] for name in block.outputs]

    def _run_step(self, step: Step, values: dict[str, object]) -> None:
        try:
            parameters = dict(step.fixed)
            for key, source in step.decoded.items():
                parameters[key] = self._decode(source, keep=False)
            for key, name in step.variable:
                parameters[key] = values[name]
            for key, names in step.variable_lists:
                parameters[key] = [values[name] for name in names]
            if step.definition.control:
                parameters["run_block"] = lambda index, *arguments: self._run_nested(
                    step.call.blocks[index], arguments, values
                )
            results = step.definition.function(step.call, **parameters)
        except ExecutorError as error:
            if error.args and str(error).startswith("function '"):
                raise  # a nested operation has named itself already
            raise ExecutorError(f"{self._where(step.call.type, step.call.name)}: {error}") from None
        except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
            text = " ".join(_explain(step, error).split())
            raise ExecutorError(f"{self._where(step.call.type, step.call.name)}: {text}") from error
        if not isinstance(results, tuple | list):
            results = (results,)
        for result, (name, type_, dtype, rounded) in zip(results, step.results, strict=False):
            values[name] = self._stored(result, name, type_, dtype, rounded, step)

    def _run_nested(self, block: PreparedBlock, arguments: tuple, values: dict) -> list:
        values.update(zip(block.inputs, arguments, strict=True))
        return self._run(block, values)

    def _stored(self, result, name, type_, dtype, rounded, step) -> np.ndarray:
        """A result in the array type of its declared type, rounded to fp16 where asked for."""
        value = np.asarray(result)
        if value.dtype != dtype:
            value = value.astype(dtype)
        if rounded:
            value = round_to_half(value)
        if len(value.shape) != len(type_.shape) or any(
            size is not None and size != real for size, real in zip(type_.shape, value.shape, strict=True)
        ):
            raise ExecutorError(
                f"{self._where(step.call.type, name)}: the result has shape {value.shape}, "
                f"the package declares {type_.shape}"
            )
        return value

    def _where(self, op_type: str, name: str) -> str:
        return f"function '{self.name}', operation '{op_type}' (output '{name}')"

    # ---- what goes in and out ----------------------------------------------------------------

    def _checked_inputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, object]:
        wanted = self.function.inputs
        for name in inputs:
            if name not in wanted:
                known = ", ".join(wanted) or "none"
                raise ExecutorError(f"function '{self.name}': unknown input '{name}' (inputs: {known})")
        for name in wanted:
            if name not in inputs:
                raise ExecutorError(f"function '{self.name}': input '{name}' is missing")
        return {name: self._checked(inputs[name], feature, "input") for name, feature in wanted.items()}

    def _checked(self, value: np.ndarray, feature: Feature, what: str) -> np.ndarray:
        """The array of an input or state in its array type; ExecutorError if it does not fit."""
        array = np.asarray(value)
        label = f"function '{self.name}': {what} '{feature.name}'"
        if len(array.shape) != len(feature.shape) or any(
            size is not None and size != real for size, real in zip(feature.shape, array.shape, strict=True)
        ):
            raise ExecutorError(f"{label} has shape {array.shape}, expected {feature.shape}")
        target = BY_NAME[feature.dtype].storage
        given, expected = _KINDS.get(array.dtype.kind), _KINDS[target.kind]
        if given != expected:
            raise ExecutorError(f"{label} has type {array.dtype}, expected {feature.dtype}")
        if expected == "integer" and array.size and array.dtype != target:
            limits = np.iinfo(target)
            if array.min() < limits.min or array.max() > limits.max:
                raise ExecutorError(f"{label} has values outside the range of {feature.dtype}")
        if array.dtype != target:
            array = array.astype(target)
        if (
            feature.dtype == "float16"
            and self.dtype == "float16"
            and (np.asarray(value).dtype != np.float16)
        ):
            array = round_to_half(array)
        return array

    def _checked_states(self, state: State | None) -> dict[str, StateHandle]:
        """Handles for all states, after replacing arrays that the program cannot work on."""
        wanted = self.function.states
        if wanted and state is None:
            raise ExecutorError(f"function '{self.name}' needs a state (see make_state)")
        for name, feature in wanted.items():
            if name not in state:
                raise ExecutorError(f"function '{self.name}': state '{name}' is missing")
            array = state[name]
            storage = BY_NAME[feature.dtype].storage
            ready = isinstance(array, np.ndarray) and (
                (array.dtype, array.shape) == (storage, feature.shape)
                and array.flags.writeable
                and array.flags.c_contiguous
            )
            if not ready:
                array = self._checked(array, feature, "state")
                state[name] = np.array(array, order="C")
        return {name: StateHandle(name, state) for name in wanted}

    def _output(self, name: str, value: np.ndarray) -> np.ndarray:
        """An own copy of an output, so that a later run cannot change it."""
        half = self.function.outputs[name].dtype == "float16" and self.dtype == "float16"
        return np.array(value, dtype=np.float16 if half else value.dtype)


@dataclass(frozen=True)
class _Folded:
    """A constexpr result: same key, same value."""

    key: tuple
    program: Program
    operation: Operation
    sources: dict[str, Constant | _Folded]
    index: int

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(size or 1 for size in self.operation.outputs[self.index][1].shape)

    def load(self) -> np.ndarray:
        """Compute the value; its inputs are not kept, they are the compressed form."""
        program, operation = self.program, self.operation
        definition = REGISTRY[operation.type]
        parameters = {key: program._decode(source, keep=False) for key, source in self.sources.items()}
        call = program._call(operation)
        step = Step(definition, call, parameters, [], [], program._results(operation, definition))
        values: dict[str, object] = {}
        program._run_step(step, values)
        return values[operation.outputs[self.index][0]]


def _explain(step: Step, error: Exception) -> str:
    """The reason of a failed operation; a parameter mismatch is told in terms of the file."""
    if isinstance(error, TypeError):
        known = inspect.signature(step.definition.function).parameters
        given = [*step.fixed, *(key for key, _ in step.variable + step.variable_lists)]
        unknown = [key for key in given if key not in known]
        if unknown:
            return f"parameter '{unknown[0]}' is not supported"
    if isinstance(error, KeyError):
        return f"value {error} is not available"
    return str(error)


def _refuse_unknown(function: Function) -> None:
    unknown = {
        operation.type: operation.label
        for operation in reversed(list(function.block.walk()))
        if operation.type != "const" and operation.type not in REGISTRY
    }
    if unknown:
        first, *others = reversed(unknown.items())
        raise UnknownOpError(*first, function.name, tuple(sorted(name for name, _ in others)))
