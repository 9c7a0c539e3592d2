"""ss-train adapter as real processes: killed and resumed, and two processes under accelerate."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ss_device.errors import UserError
from ss_device.training.adapt import joined_processes
from ss_device.training.command import main
from tests.tiny_models import make_tiny_base

SETTINGS = json.dumps(
    {"num_streams": 2, "num_msa_layers": 2, "stream_mlp": "base", "stream_lora_rank": 2,
     "stream_lora_alpha": 4, "bigram_rank": 4}
)  # fmt: skip
COMMAND = "import sys; from ss_device.training.command import main; sys.exit(main(sys.argv[1:]))"


# accelerate offers FSDP on accelerators only, PyTorch on CPUs too: its state is told so by hand.
SHARDED = """
import sys
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
state = Accelerator(cpu=True).state
state.distributed_type = DistributedType.FSDP
state.fsdp_plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
)
from ss_device.training.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("processes")
    make_tiny_base(root / "base")
    rows = [
        {"question": f"q{i % 7}?", "context": "t" * (i % 5), "answer": f"SELECT {i % 11} FROM t"}
        for i in range(60)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return root


def arguments(folder: Path, output: str, *more: str) -> list[str]:
    return [
        "adapter", "sqlctx", "--base", str(folder / "base"), "--data", str(folder / "rows.jsonl"),
        "--settings", SETTINGS, "--output", str(folder / output), "--epochs", "2",
        "--tokens-per-batch", "320", "--learning-rate", "0.01", "--evaluate-every", "4",
        "--checkpoint-minutes", "0", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    """The uninterrupted run of one process."""
    assert main(arguments(folder, "whole")) == 0
    return folder / "whole"


def log_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output.with_name(output.name + ".run") / "log.jsonl").open()]


@pytest.fixture(scope="module")
def killed(folder, whole) -> Path:
    """The folder of a run that was killed in the middle."""
    command = [sys.executable, "-c", COMMAND, *arguments(folder, "killed")]
    log = folder / "killed.run" / "log.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "killed").exists()
    done = json.loads((folder / "killed.run/checkpoint/record.json").read_text())["step"]
    assert 0 < done < log_of(whole)[-1]["steps"]
    return folder / "killed.run"


def test_killed_run_resumes_to_the_same_bytes(folder, whole, killed):
    shutil.copytree(killed, folder / "cut.run")
    assert main(arguments(folder, "cut", "--resume")) == 0
    name = "speculative.safetensors"
    assert (folder / "cut" / name).read_bytes() == (whole / name).read_bytes()
    strip = ("seconds", "tokens_per_second", "eta")
    lines = [[{k: v for k, v in r.items() if k not in strip} for r in log_of(o)]
             for o in (folder / "cut", whole)]  # fmt: skip
    assert lines[0] == lines[1]


def test_log_tells_speed_eta_and_validation(whole):
    lines = log_of(whole)
    assert [r["step"] for r in lines] == sorted({r["step"] for r in lines})
    for line in lines:
        assert line["tokens_per_second"] > 0 and line["eta"] >= 0 and line["parts"]["stream_1"] > 0
        if line["step"] % 4 == 0:
            valid = line["valid"]
            assert len(valid["top1"]) == 2 and 0 <= valid["early_top1"] <= 1
            assert 1 <= valid["tokens_per_call"] <= valid["tokens_per_call_top3"] <= 3
    assert lines[-1]["eta"] == 0


def launched(folder: Path, output: str, *more: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", "0", "-m", "ss_device.training.command",
        *arguments(folder, output, *more),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.heavy
def test_two_processes_in_segments_train_like_one_without(folder, whole):
    """DDP: same log and, to rounding, the same weights; the processes share each step's documents."""
    result = launched(folder, "ddp", "--segment", "8")
    assert result.returncode == 0, result.stderr[-2000:]
    compare(folder / "ddp", whole)


@pytest.mark.heavy
def test_two_sharded_processes_go_on_like_one(folder, whole, killed):
    """FSDP: reads the checkpoint that one process left, trains the rest, writes an ordinary adapter."""
    (folder / "sharded.py").write_text(SHARDED)
    shutil.copytree(killed, folder / "sharded.run")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(folder / "sharded.py"), *arguments(folder, "sharded", "--resume"),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    compare(folder / "sharded", whole)


def test_processes_that_are_not_joined_are_refused(monkeypatch):
    """Processes that each believe to be alone would write into the same folder."""
    assert joined_processes().num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started, but accelerate joins 1"):
        joined_processes()


def compare(output: Path, whole: Path) -> None:
    for mine, theirs in zip(log_of(output), log_of(whole), strict=True):
        assert mine["step"] == theirs["step"]
        for name, value in theirs["parts"].items():
            assert mine["parts"][name] == pytest.approx(value, abs=2e-3), name
    tensors, wanted = (load_file(f / "speculative.safetensors") for f in (output, whole))
    for name, tensor in wanted.items():
        difference = np.abs(tensors[name].astype(np.float32) - tensor.astype(np.float32)).max()
        assert difference < 5e-3, (name, difference)
