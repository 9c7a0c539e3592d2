"""Command line of the executor: describe a package, or run one of its functions."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np

from .errors import ExecutorError
from .package import DTYPES, Feature, Function, Package, load_package

_EXAMPLE = """example:
  python -m ss_executor model.mlpackage
  python -m ss_executor model.mlpackage --function main \\
      --inputs in.npz --outputs out.npz --dtype float32
"""


DEFECT = 70  # EX_SOFTWARE of sysexits.h


class _Parser(argparse.ArgumentParser):
    """Ends bad options with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m ss_executor",
        description="Describe a saved Core ML package, or run one of its functions in numpy.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("package", type=Path, help="a .mlpackage folder")
    parser.add_argument("--json", action="store_true", help="describe as JSON")
    parser.add_argument("--debug", action="store_true", help="show where an unexpected error arose")
    parser.add_argument("--function", help="function to run (describes the package without it)")
    parser.add_argument("--inputs", type=Path, help=".npz file with one array per input")
    parser.add_argument("--state", type=Path, help=".npz file with one array per state (else 0)")
    parser.add_argument("--outputs", type=Path, help=".npz file to write the outputs to")
    parser.add_argument("--state-out", type=Path, help=".npz file to write the states to")
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="round fp16 tensors after every operation (float16, default) or never (float32)",
    )  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error for bad input, or 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        package = load_package(options.package)
        if options.function is None:
            _describe(package, options.json)
        else:
            _run(package, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted; nothing may be written when the interpreter ends either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ExecutorError, OSError, MemoryError) as error:
        print(f"error: {_shown(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        if options.debug:
            raise
        what = f"unexpected {type(error).__name__}: {_shown(error)}"
        print(f"error: {what} (--debug shows where)", file=sys.stderr)
        return DEFECT
    return 0


def _shown(value: object) -> str:
    """Text on one line, with escapes for what moves a terminal's cursor."""
    line = " ".join(str(value).split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""
    if options.function is None:
        for name in ("inputs", "state", "outputs", "state_out", "dtype"):
            if getattr(options, name) is not None:
                raise ExecutorError(f"--{name.replace('_', '-')} needs --function, which to run")
    elif options.json:
        raise ExecutorError("--json describes the package; leave --function out")


def _features(features: dict[str, Feature]) -> list[dict]:
    return [{"name": f.name, "shape": f.shape, "dtype": f.dtype} for f in features.values()]


def _function_record(function: Function) -> dict:
    return {
        "opset": function.opset,
        "inputs": _features(function.inputs),
        "outputs": _features(function.outputs),
        "states": _features(function.states),
        "operations": function.op_histogram(),
    }


def _describe(package: Package, as_json: bool) -> None:
    record = {
        "package": str(package.path),
        "specification_version": package.specification_version,
        "weight_bytes": package.weight_bytes,
        "metadata": package.metadata,
        "functions": {name: _function_record(f) for name, f in package.functions.items()},
    }
    if as_json:
        print(json.dumps(record, indent=2))
        return
    print(f"{_shown(package.path)}: specification {package.specification_version}, "
          f"{package.weight_bytes} bytes of weights")  # fmt: skip
    for key, value in sorted(package.metadata.items()):
        print(f"  {_shown(key)}: {_shown(value)}")
    for name, function in record["functions"].items():
        print(f"function {_shown(name)} (opset CoreML{function['opset']})")
        for kind in ("inputs", "outputs", "states"):
            for feature in function[kind]:
                shape = ", ".join("?" if size is None else str(size) for size in feature["shape"])
                print(f"  {kind[:-1]:6} {_shown(feature['name'])}: {feature['dtype']} ({shape})")
        counts = ", ".join(f"{op} {count}" for op, count in function["operations"].items())
        print(f"  operations: {_shown(counts)}")


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        raise ExecutorError(f"{path}: no such file") from None
    except Exception as error:  # numpy raises many kinds for a file that is not .npz
        raise ExecutorError(f"{path}: not a readable .npz file ({error})") from None


def _run(package: Package, options: argparse.Namespace) -> None:
    if options.outputs is None:
        raise ExecutorError("--function needs --outputs, a .npz file for the results")
    program = package.program(options.function, options.dtype or "float16")
    inputs = _load_arrays(options.inputs) if options.inputs else {}
    state = program.make_state()
    if options.state:
        given = _load_arrays(options.state)
        unknown = sorted(given.keys() - state.keys())
        if unknown:
            raise ExecutorError(f"{options.state}: the function has no state '{unknown[0]}'")
        state.update(given)
    outputs = program.predict(inputs, state)
    np.savez(options.outputs, **outputs)
    if options.state_out:
        np.savez(options.state_out, **state)
    for name, value in outputs.items():
        print(f"{name}: {value.dtype} {value.shape}")
