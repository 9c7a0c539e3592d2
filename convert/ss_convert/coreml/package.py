"""Saving MIL programs as one multifunction package whose functions share their weights."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import coremltools as ct
from coremltools.converters.mil.mil import Program

from ss_convert.coreml.merging import merge_specs
from ss_convert.disk import temporary_files_in

# The graph is built as it should run, so only clean-up and what states need is applied: fusions could
# change an order of operations, and every pass costs a check of the whole program.
PASSES = (
    "common::noop_elimination",
    "common::const_elimination",
    "common::const_deduplication",
    "common::remove_redundant_ops",
    "common::dedup_op_and_var_names",
    "common::canonicalize_inplace_pattern",
    "common::prefer_state_in_downstream",
    "common::dead_code_elimination",
)


def save_package(
    programs: Mapping[str, Program], default: str, metadata: Mapping[str, str], path: Path
) -> None:
    """Write programs (function name → program) to `path`, replacing what is there."""
    with beside(path) as folder:
        save_functions(programs, folder)
        merge_functions(
            {name: (function_path(folder, name), "main") for name in programs}, default, metadata, path
        )


def save_functions(programs: Mapping[str, Program], folder: Path) -> None:
    """Write every program as a package of its own, to be merged later (`function_path`)."""
    # coremltools writes a package among the temporary files; from there it is renamed.
    with temporary_files_in(folder):
        for name, program in programs.items():
            model, path = _to_model(program), function_path(folder, name)
            shutil.rmtree(path, ignore_errors=True)
            os.replace(model.package_path, path)


def function_path(folder: Path, name: str) -> Path:
    """Where `save_functions` puts a function."""
    return folder / f"{name}.mlpackage"


def merge_functions(
    sources: Mapping[str, tuple[Path, str]], default: str, metadata: Mapping[str, str], path: Path
) -> None:
    """Write to `path` one package with the functions `sources`: name → (package, its function there).

    Compressed constants are shared like others. `path` may be one of the sources; it is replaced whole.
    """
    with beside(path) as folder, temporary_files_in(folder):
        merged = merge_specs(sources, default, metadata, folder)
        if path.exists():
            shutil.rmtree(path)
        os.replace(merged, path)


def _to_model(program: Program) -> ct.models.MLModel:
    """Convert without any change of precision: the program says where fp16 is and where it is not."""
    with _quiet(), _checked_once():
        return ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
            pass_pipeline=ct.PassPipeline(list(PASSES), "clean-up"),
        )


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary folder on the target's file system, so that the last move is a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".coreml-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _checked_once() -> Iterator[None]:
    """Have a program checked when it is written, not also before and after every pass."""
    check = Program.validate

    def when_written(program: Program, *, check_essential_scope: bool = False, **options) -> None:
        if check_essential_scope:
            check(program, check_essential_scope=True, **options)

    with mock.patch.object(Program, "validate", when_written):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide coremltools' progress bars; errors still raise."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
