"""A disk that fills up or a kill in the middle: the earlier bundle stays whole, for new bundles and --into.

A small file system in memory where one can be mounted (needs root); everywhere the system's limit on file
sizes: a write beyond it fails like one to a full disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ss_convert.command import main as ss_convert
from ss_convert.coreml.merging import MODEL, read_spec
from ss_convert.disk import refused
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1)
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from ss_convert.command import main
sys.exit(main(sys.argv[2:]))
"""
RUN = """
import sys
from ss_convert.command import main
sys.exit(main(sys.argv[1:]))
"""
KILLED_IN_MERGE = """
import os, signal, sys
from ss_convert.coreml import package
package.merge_specs = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
from ss_convert.command import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def small_models(tmp_path_factory) -> Path:
    """A base of two layers, adapters `one` and `two`."""
    folder = tmp_path_factory.mktemp("models")
    base = make_tiny_base(folder / "base" / "tiny-base", dtype="float16", num_hidden_layers=2)
    for seed, app in enumerate(("one", "two")):
        adapter = random_adapter(base, CONFIG, seed=seed, app=app)
        save_adapter(adapter, base.architecture, folder / "adapters" / app)
    return folder


@pytest.fixture(scope="module")
def made(small_models, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("build") / "made"
    assert (
        ss_convert(arguments(small_models, "one", "--output", output, "--nodes", 3, "--context", 16)) == 0
    )
    return output


@pytest.fixture
def earlier(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "earlier"))


def arguments(models, app, *more) -> list[str]:
    return ["--adapter", app, "--models", str(models), "--no-golden", *map(str, more)]


def run_python(program: str, *more, temporary: Path | None = None) -> subprocess.CompletedProcess:
    environment = os.environ | ({} if temporary is None else {"TMPDIR": str(temporary)})
    command = [sys.executable, "-c", program, *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mount a file system of that many kilobytes; it is gone with the test."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        if result.returncode:
            pytest.skip(f"no file system can be mounted here: {result.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def assert_refused(result: subprocess.CompletedProcess, place: Path) -> None:
    """Exit code 2 and one line that names the place."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"error: {place}") and result.stderr.count("\n") == 1, result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# No file may be as large as this one is in the earlier bundle.
@pytest.mark.parametrize("largest", ["base.safetensors", "model.mlmodel", "weight.bin"])
def test_a_full_disk_is_one_line_and_the_earlier_bundle_stays(small_models, earlier, largest):
    before = contents(earlier)
    [limit] = [len(content) - 1 for name, content in before.items() if name.endswith(largest)]
    result = run_python(LIMITED, limit, *arguments(small_models, "two", "--into", earlier))
    assert_refused(result, earlier)
    assert contents(earlier) == before
    assert tuple(open_bundle(earlier, verify=True).manifest.adapters) == ("one",)


# Kilobytes left beside the earlier bundle: too few for a copy of its MLX files; for the new functions.
@pytest.mark.parametrize("left", [40, 250])
def test_a_disk_without_space_is_one_line_and_the_earlier_bundle_stays(
    small_models, made, small_disk, left
):
    used = sum(-(-path.stat().st_size // 4096) * 4 + 4 for path in made.rglob("*"))
    disk = small_disk(used + left)
    earlier = Path(shutil.copytree(made, disk / "earlier"))
    before = contents(earlier)
    result = run_python(RUN, *arguments(small_models, "two", "--into", earlier))
    assert_refused(result, earlier)
    assert contents(earlier) == before
    assert tuple(open_bundle(earlier, verify=True).manifest.adapters) == ("one",)


def test_the_sizes_command_on_a_full_disk(small_models, small_disk):
    disk = small_disk(150)
    options = ("--adapter", "one", "--models", small_models, "--weights", "fp16")
    assert_refused(run_python(RUN, "sizes", *options, temporary=disk), disk)
    assert list(disk.iterdir()) == []


def test_a_full_system_folder_for_temporary_files_matters_to_no_conversion(
    small_models, small_disk, tmp_path
):
    options = ("--output", tmp_path / "out", "--nodes", 3, "--context", 16, "--target", "coreml")
    result = run_python(RUN, *arguments(small_models, "one", *options), temporary=small_disk(8))
    assert result.returncode == 0, result.stderr


def test_killed_while_adding_an_adapter_and_resumed(small_models, earlier, tmp_path, capsys):
    before = contents(earlier)
    command = arguments(small_models, "two", "--into", earlier)
    system = tmp_path / "system"
    system.mkdir()
    killed = run_python(KILLED_IN_MERGE, *command, temporary=system)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents(earlier) == before and list(system.iterdir()) == []
    system.rmdir()
    assert ss_convert([*command, "--json"]) == 0
    assert '"reused": ["mlx", "coreml two"]' in capsys.readouterr().out
    assert sorted(open_bundle(earlier, verify=True).manifest.adapters) == ["one", "two"]
    assert [p.name for p in earlier.parent.iterdir()] == ["earlier"]


def test_adding_to_a_bundle_whose_base_was_retrained(small_models, earlier, tmp_path, refuses):
    """The adapter fits the base as it is now; the bundle was made from the base as it was."""
    models = Path(shutil.copytree(small_models, tmp_path / "models"))
    make_tiny_base(models / "base" / "tiny-base", seed=9, dtype="float16", num_hidden_layers=2)
    base = open_base(models / "base" / "tiny-base")
    save_adapter(random_adapter(base, CONFIG, app="two"), base.architecture, models / "adapters" / "two")
    before = contents(earlier)
    says = ("was made from base 'tiny-base'", "this base is 'tiny-base'", "convert all adapters again")
    refuses(ss_convert, *arguments(models, "two", "--into", earlier), says=says)
    assert contents(earlier) == before


def test_a_damaged_bundle_is_not_extended(small_models, earlier, refuses):
    (earlier / "mlx" / "base.safetensors").write_bytes(b"")
    says = ("base.safetensors", "0 bytes")
    refuses(ss_convert, *arguments(small_models, "two", "--into", earlier), says=says)


def test_refused_writes_are_known_by_number_text_and_cause():
    assert refused(OSError(errno.ENOSPC, "x")) == os.strerror(errno.ENOSPC)
    assert refused(RuntimeError("I/O error: (os error 28)")) == os.strerror(errno.ENOSPC)
    copied = [("a", "b", "[Errno 28] No space left on device: 'b'")]
    assert refused(shutil.Error(copied)) == os.strerror(errno.ENOSPC)
    text = "filesystem error: cannot copy: No space left on device [a] [b]"
    assert refused(RuntimeError(text)) == os.strerror(errno.ENOSPC)
    text = "[MIL FileWriter]: Unknown error occurred while writing data to the file."
    assert "coremltools was refused a write" in refused(RuntimeError(text))
    text = "filesystem error: cannot copy: Input/output error [a] [b]"
    assert "coremltools was refused a write" in refused(RuntimeError(text))
    try:
        try:
            raise OSError(errno.EDQUOT, "x")
        except OSError as error:
            raise ValueError("later") from error
    except ValueError as error:
        assert refused(error) == os.strerror(errno.EDQUOT)
    assert refused(shutil.Error([("a", "b", "[Errno 13] Permission denied: 'b'")])) is None
    assert refused(OSError(errno.EACCES, "x")) is None and refused(ValueError("os error x")) is None


def test_the_package_of_the_earlier_bundle_is_read_and_not_written(earlier, small_models):
    """coremltools' own reader replaces a package's Manifest.json; a kill there would leave two."""
    [package] = (earlier / "coreml").iterdir()
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in package.rglob("*")}
    assert read_spec(package).mlProgram.functions
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in package.rglob("*")} == before
    (package / MODEL).write_bytes(b"\xff" * 40)
    with pytest.raises(UserError, match="not a readable Core ML package"):
        read_spec(package)
