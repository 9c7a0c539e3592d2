"""Conversions that die: no half bundle, an earlier bundle survives, the next run resumes."""

from __future__ import annotations

import filecmp
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ss_convert import conversion, golden
from ss_convert.command import main as ss_convert
from ss_device.bundle import open_bundle
from ss_device.errors import UserError
from tests.commands.conftest import SIZES

# Kills its own process without a chance to clean up, at the moment a stage begins.
KILLED = """
import os, signal, sys
import {module}
{module}.{function} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
from ss_convert.command import main
main(sys.argv[1:])
"""
HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'transformers', 'mlx'):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda n, *a: None if n in ('torch', 'transformers', 'mlx') else find_spec(n, *a)
from ss_convert.command import main
status = main(sys.argv[1:])
assert not {'torch', 'mlx'} & set(sys.modules)
sys.exit(status)
"""


def arguments_for(models, output, *more):
    return ["--adapter", "tiny", "--models", str(models), "--output", str(output), *SIZES, *more]


def run_python(program: str, arguments: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("module", "function", "finished"),
    [
        ("ss_convert.mlx.weights", "write_adapter", []),
        ("ss_convert.golden", "record_traces", ["mlx", "coreml tiny", "coreml", "sizes"]),
        ("ss_convert.conversion", "write_manifest", []),
    ],
)
def test_killed_conversion_leaves_no_bundle_and_the_next_run_succeeds(
    capsys, models, tmp_path, module, function, finished
):
    output = tmp_path / "out"
    # Finished stages are what is expensive: only one case pays for Core ML twice.
    target = "both" if finished else "mlx"
    arguments = arguments_for(models, output, "--target", target)
    killed = run_python(KILLED.format(module=module, function=function), arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not output.exists()
    assert ss_convert([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] == finished
    open_bundle(output, verify=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_library_left_half_written_is_not_published(capsys, models, tmp_path):
    """A library may write under a name of its own first: a kill leaves that file in the stage's folder."""
    output, whole = tmp_path / "out", tmp_path / "whole"
    arguments = arguments_for(models, output, "--target", "mlx")
    killed = run_python(KILLED.format(module="ss_device.trace", function="save"), arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    partial = tmp_path / ".out.partial"
    for name in ("golden/.tmpz1uW3R", "mlx/.tmpz1uW3R", "new/.tmpz1uW3R", ".tmpz1uW3R"):
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_bytes(b"half")
    assert ss_convert([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] == ["mlx"]
    assert ss_convert(arguments_for(models, whole, "--target", "mlx")) == 0
    assert not filecmp.dircmp(output, whole).diff_files
    listed = [sorted(p.relative_to(d) for p in d.rglob("*")) for d in (output, whole)]
    assert listed[0] == listed[1]


def test_killed_from_outside_at_any_moment(models, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "ss_convert.command", *arguments_for(models, output)]
    command[1:3] = ["-c", "import sys; from ss_convert.command import main; main(sys.argv[1:])"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300  # a process starts slowly where others share its core
    while not (tmp_path / ".out.partial" / "functions").is_dir():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()
    assert ss_convert(arguments_for(models, output, "--target", "mlx")) == 0
    open_bundle(output, verify=True)
    assert not (output / "coreml").exists()


def test_other_inputs_reuse_nothing(capsys, monkeypatch, models, tmp_path):
    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(golden, "record_traces", fail)
        assert ss_convert(arguments_for(models, output, "--target", "mlx")) == 2
    capsys.readouterr()
    arguments = arguments_for(models, output, "--target", "mlx", "--context", "64", "--json")
    assert ss_convert(arguments) == 0
    assert json.loads(capsys.readouterr().out)["reused"] == []


def fail(*arguments, **settings):
    raise UserError("the disk is full")


def test_existing_bundle_survives_a_failing_conversion(capsys, monkeypatch, models, tmp_path):
    output = tmp_path / "out"
    arguments = arguments_for(models, output, "--target", "mlx", "--no-golden")
    assert ss_convert(arguments) == 0
    before = (output / "manifest.json").read_bytes()
    for raised, status in ((fail, 2), (interrupt, 130)):
        monkeypatch.setattr(conversion, "_check", raised)
        assert ss_convert([*arguments, "--force"]) == status
        assert (output / "manifest.json").read_bytes() == before
        open_bundle(output, verify=True)
    monkeypatch.undo()
    assert ss_convert([*arguments, "--force"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    capsys.readouterr()


def interrupt(*arguments, **settings):
    raise KeyboardInterrupt


def test_damaged_bundle_is_converted_again(capsys, models, tmp_path):
    output = tmp_path / "out"
    arguments = arguments_for(models, output, "--target", "mlx", "--no-golden")
    assert ss_convert(arguments) == 0
    (output / "mlx" / "base.safetensors").write_bytes(b"")
    assert ss_convert(arguments) == 0
    open_bundle(output, verify=True)
    capsys.readouterr()


def test_core_ml_and_mlx_files_need_neither_torch_nor_mlx(models, bundle, tmp_path):
    """Without them the traces are skipped, with a note, or taken from the adapter folder."""
    output = tmp_path / "out"
    result = run_python(HIDDEN, arguments_for(models, output))
    assert result.returncode == 0, result.stderr
    assert "golden traces skipped: PyTorch is not installed" in result.stdout
    weights = "mlx/base.safetensors"
    assert (output / weights).read_bytes() == (bundle / weights).read_bytes()
    assert open_bundle(output).adapter().golden is None


def test_traces_of_the_adapter_folder_serve_without_torch(own_models, bundle, tmp_path):
    folder = own_models / "adapters" / "tiny"
    for end in ("json", "safetensors"):
        (folder / f"golden.{end}").write_bytes((bundle / "golden" / f"tiny.{end}").read_bytes())
    output = tmp_path / "out"
    result = run_python(HIDDEN, arguments_for(own_models, output, "--target", "mlx"))
    assert result.returncode == 0, result.stderr
    assert "those of the adapter folder" in result.stdout
    traces = "golden/tiny.safetensors"
    assert (output / traces).read_bytes() == (bundle / traces).read_bytes()
