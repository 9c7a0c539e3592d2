"""`ss_convert.convert`: what the command does, from Python."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest

from ss_convert import conversion, convert
from ss_convert.settings import ConversionSettings
from ss_device.errors import UserError

SMALL = ConversionSettings(num_nodes=12, context=96, chunk=16)


@pytest.fixture
def mlx(models, tmp_path):
    """A bundle with MLX weights alone, and the keywords that it was made with."""
    wanted = {"output": tmp_path / "out", "models": models, "targets": ("mlx",), "settings": SMALL}
    return convert("tiny", **wanted), wanted


def test_the_bytes_are_those_of_the_command(bundle, models, tmp_path):
    made = convert("tiny", output=str(tmp_path / "out"), models=str(models), settings=SMALL)
    assert made.path == tmp_path / "out"
    files = ["manifest.json", *made.manifest.files]
    assert set(files) == {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
    assert filecmp.cmpfiles(bundle, made.path, files, shallow=False) == (files, [], [])


def test_the_same_inputs_are_not_converted_again(mlx, monkeypatch):
    made, wanted = mlx
    monkeypatch.setattr(conversion, "run_plan", None)
    assert convert(["tiny"], **wanted) == made


def test_another_bundle_is_replaced_when_it_may_be(mlx):
    made, wanted = mlx
    with pytest.raises(UserError, match="holds a bundle already"):
        convert("tiny", **wanted, golden=False)
    again = convert("tiny", **wanted, golden=False, force=True)
    assert again.path == made.path and again.adapter().golden is None and made.adapter().golden


def test_fields_of_the_settings_are_keywords(models, tmp_path):
    changes = {"weights": "int8", "num_nodes": 6, "golden": False}
    made = convert(
        Path("tiny"), tmp_path / "out", models=models, targets="coreml", settings=SMALL, **changes
    )
    functions = made.adapter("tiny").coreml
    assert (functions.weights, functions.embedding_weights) == ("int8", "int8")
    assert (functions.num_nodes, functions.context, functions.chunk) == (6, 96, 16)
    assert made.manifest.made.targets == ("coreml",)


def test_an_adapter_is_added_to_a_bundle(mlx, models, tmp_path):
    made, wanted = mlx
    again = convert("tiny", into=str(made.path), models=models)
    assert again.path == made.path and again.manifest.made.targets == ("mlx",)
    with pytest.raises(UserError, match="output and into exclude each other"):
        convert("tiny", output=tmp_path / "other", into=made.path, models=models)


def test_stages_are_reported(models, tmp_path):
    told = []
    convert("tiny", tmp_path / "out", models=models, targets=("mlx",), settings=SMALL, report=told.append)
    assert told == ["mlx", "golden tiny", "check", "manifest"]


@pytest.mark.parametrize(
    ("adapters", "changes", "says"),
    [
        ("tiny", {"wieghts": "int8"}, "there is no setting 'wieghts' (known: "),
        ("tiny", {"weights": "int9"}, "weights 'int9' is not one of fp16, "),
        ("tiny", {"num_nodes": "12"}, "num_nodes '12' is not a whole number"),
        ("tiny", {"num_nodes": 0}, "Core ML option num_nodes must be at least 1"),
        ("tiny", {"parts": "many"}, "parts 'many' is neither a number from 1 up nor 'auto'"),
        ("tiny", {"targets": ("metal",)}, "target 'metal' is not one of coreml, mlx, mlxfn"),
        ("tiny", {"targets": ("mlxfn",)}, "target 'mlxfn' is made from the MLX weights; add 'mlx'"),
        ("tiny", {"targets": ("mlx",), "weights": "int8"}, "--weights is for Core ML packages"),
        ("tiny", {"golden": False, "golden_prompts": "x"}, "golden_prompts and golden exclude each other"),
        ([], {}, "name at least one adapter"),
        ([], {"output": None}, "name at least one adapter"),
        ("none", {}, "adapter 'none'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(models, tmp_path, adapters, changes, says):
    with pytest.raises(UserError) as refused:
        convert(adapters, **{"output": tmp_path / "out", "models": models, **changes})
    assert says in str(refused.value)
    assert not list(tmp_path.iterdir())


HOLDER = """
import sys
from pathlib import Path
from ss_device.outputs import output_lock
with output_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_writes_an_output(models, tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process is writing it"):
            convert("tiny", output, models=models, targets=("mlx",))
        holder.stdin.close()
    assert not output.exists()
