"""The small files that cases damage: bases, adapters, a bundle, data, a recipe, runs, results.

Built once by the commands themselves and kept: a case is replayable because the files stay the same.
`python -m tests.fuzz.inputs FOLDER` builds them.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = "work"
SIZES = ("--nodes", "6", "--context", "64", "--chunk", "16")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
APP = """name = "pair"
title = "Questions over tables"
[prompt]
template = "{context}\\n-- {question}\\n"
completion = "{answer}"
[data]
hub = "nobody/nothing"
columns = { question = "question", context = "context", answer = "answer" }
[metric]
name = "sql"
reference = "answer"
schema = "context"
[stop]
strings = ["###"]
max_tokens = 6
"""
TALK = """name = "talk"
kind = "chat"
[chat]
template = "tokenizer"
[stop]
max_tokens = 4
"""
RECIPE = """name = "tiny"
seed = 3
[tokenizer]
vocab_size = 259
sample_documents = 10
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
[training]
tokens_per_batch = 128
max_length = 64
learning_rate = 1e-2
warmup_steps = 1
weight_decay = 0.1
steps = 1
[[sources]]
kind = "application"
app = "pair"
path = "rows.jsonl"
weight = 0.5
[[sources]]
kind = "continuations"
path = "own.jsonl"
weight = 0.5
augmentation = ""
[[checks]]
app = "pair"
path = "rows.jsonl"
prompts = 1
max_tokens = 2
"""
SETTINGS = json.dumps({"num_streams": 2, "num_msa_layers": 1, "pruning_rank": 2, "stream_adapter_rank": 2})
RANKS = {
    "counts": [[5, 1, 0, 8], [3, 2, 1, 8]],
    "top1": [0.3, 0.2],
    "joint": {"0 0": 5, "1 3": 1, "3 3": 8},
}
ADAPTER_RUN = (
    "adapter", "pair", "--base", "models/base/tiny-base", "--data", "data/rows.jsonl",
    "--settings", SETTINGS, "--output", "runs/adapter", "--epochs", "1", "--limit", "4",
    "--valid", "1", "--tokens-per-batch", "128",
)  # fmt: skip
LORA_RUN = (
    "lora", "pair", "--base", "models/base/tiny-base", "--data", "data/rows.jsonl",
    "--output", "runs/lora", "--epochs", "1", "--limit", "4", "--rank", "2", "--tokens-per-batch", "128",
)  # fmt: skip
BASE_RUN = (
    "base", "recipe.toml", "--data", "data", "--output", "runs/base", "--steps", "1", "--precision", "fp32",
    "--tokenizer", "models/base/tiny-base",
)  # fmt: skip


def default_folder() -> Path:
    """Where the inputs are kept between campaigns."""
    return REPOSITORY / "build" / "fuzz-inputs"


def ready_inputs(folder: Path, rebuild: bool = False) -> Path:
    """The inputs, built in a process of their own where they are missing."""
    if rebuild or not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "tests.fuzz.inputs", str(folder)]
        subprocess.run(command, check=True, cwd=REPOSITORY, stdout=sys.stderr)
    return folder


def build(folder: Path) -> None:
    """Write everything below `folder`; commands run with `folder/work` as working directory."""
    work = folder / WORK
    for name in ("data", "cache", "results", "runs", "out", "apps/pair", "apps/talk", "canary"):
        (work / name).mkdir(parents=True)
    os.environ["SS_APPS"] = str(work / "apps")
    os.chdir(work)
    _write_texts()
    _make_models()
    _make_packed_base()
    _make_bundles()
    _make_runs()
    _make_results()
    _write_canaries(folder)
    (folder / "complete").write_text("")


def _write_texts() -> None:
    """Applications, rows and the recipe."""
    Path("apps/pair/app.toml").write_text(APP)
    Path("apps/talk/app.toml").write_text(TALK)
    Path("recipe.toml").write_text(RECIPE)
    tables = "CREATE TABLE t (a INTEGER)"
    rows = [{"question": f"q{i}?", "context": tables, "answer": f"SELECT {i} FROM t"} for i in range(6)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path("data/rows.jsonl").write_text(text)
    Path("data/rows.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    prompts = [{"prompt": "SELECT a"}, {"prompt": "the prompt, again"}]
    Path("data/prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    request = {"model": "tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3}
    request |= {"stop": ["###"], "min_p": 0.0, "stream": False, "n": 1, "repetition_penalty": 1.1}
    Path("data/text.json").write_text(json.dumps({**request, "prompt": "SELECT a"}))
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    Path("data/chat.json").write_text(json.dumps({**request, "messages": said, "lossy_typical": 0.1}))
    talk = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}] * 2
    Path("data/talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))


def _make_models() -> None:
    """Two bases (one in shards with an index), adapters of both modes."""
    from safetensors.numpy import load_file, save_file

    from ss_device.adapter import save_adapter
    from ss_device.base_model import open_base
    from ss_device.config import SpeculativeConfig
    from tests.tiny_models import make_tiny_base, random_adapter

    path = Path("models/base/tiny-base")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "vocab_size": 259}
    base = make_tiny_base(path, dtype="float16", **sizes)
    _write_tokenizer_config(path)
    sharded = Path(shutil.copytree(path, "models/base/sharded-base"))
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, sharded / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}}
    index["weight_map"] = {name: file for file, held in shards.items() for name in held}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    lossless = SpeculativeConfig(
        num_streams=2, num_msa_layers=1, stream_mlp="base", stream_lora_rank=2, stream_lora_alpha=4.0,
        bigram_rank=2, pruning_rank=2, stream_adapter_rank=2,
    )  # fmt: skip
    for app, of, seed in (("tiny", path, 1), ("second", path, 2), ("sharded", sharded, 3)):
        adapter = random_adapter(open_base(of), lossless, seed=seed, app=app)
        adapter = replace(adapter, rank_statistics=RANKS)
        save_adapter(adapter, base.architecture, Path("models/adapters") / app)
        shutil.copy("data/prompts.jsonl", Path("models/adapters") / app / "golden_prompts.jsonl")
    _make_shared_adapter(base)


def _make_packed_base() -> None:
    """A base wide enough for MLX's groups, an adapter of it, and the base's copy as mlx-lm quantizes it."""
    from mlx_lm.utils import load_model, quantize_model, save_model

    from ss_device.adapter import save_adapter
    from ss_device.config import SpeculativeConfig
    from tests.tiny_models import make_tiny_base, random_adapter

    wide, packed = Path("models/base/wide-base"), Path("models/base/packed-base")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128, "vocab_size": 259}
    base = make_tiny_base(wide, dtype="bfloat16", **sizes)
    config = SpeculativeConfig(num_streams=2, num_msa_layers=1, pruning_rank=2, stream_adapter_rank=2)
    adapter = random_adapter(base, config, seed=5, app="wide")
    save_adapter(adapter, base.architecture, Path("models/adapters/wide"))
    model, settings = quantize_model(*load_model(wide), group_size=64, bits=4, mode="affine")
    save_model(packed, model)
    (packed / "config.json").write_text(json.dumps(settings))
    shutil.copy(wide / "tokenizer.json", packed)


def _write_tokenizer_config(folder: Path) -> None:
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    config |= {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _make_shared_adapter(base) -> None:
    from ss_device.config import SpeculativeConfig
    from tests.commands.conftest import save_with_lora
    from tests.tiny_models import random_adapter

    config = SpeculativeConfig(
        mode="shared", num_streams=2, num_msa_layers=1, stream_mlp="base", stream_adapter_rank=0,
        lora_rank=2, lora_alpha=4.0, pruning_rank=2,
    )  # fmt: skip
    folder = Path("models/adapters/shared")
    save_with_lora(random_adapter(base, config, seed=4, app="shared"), base, folder)
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def _run(main, *arguments: str) -> None:
    if (code := main(list(arguments))) != 0:
        raise SystemExit(f"the inputs cannot be built: {' '.join(arguments)} ended with {code}")


def _make_bundles() -> None:
    """`bundle` with everything, `out/earlier` with MLX alone, recorded traces, tuning, a prompt cache."""
    from ss_convert.command import main as ss_convert
    from ss_runtime.commands.generate import main as ss_generate
    from ss_runtime.commands.validate import main as ss_validate

    both = ("--adapter", "tiny", "--adapter", "shared", "--models", "models")
    _run(ss_convert, *both, "--output", "bundle", "--target", "all", *SIZES)
    only = ("--adapter", "tiny", "--models", "models", "--target", "mlx", "--no-golden")
    _run(ss_convert, *only, "--output", "out/earlier", *SIZES)
    quantized = ("--adapter", "wide", "--models", "models", "--base", "models/base/packed-base")
    _run(ss_convert, *quantized, "--output", "packed", "--target", "mlx", "--no-golden", "--nodes", "6")
    Path("bundle/tuning.json").write_text(json.dumps(_tuning(), indent=1))
    few = ("--prompts", "data/prompts.jsonl", "--limit", "2", "--device", "cpu")
    _run(ss_validate, "bundle", "--record", "traces", *few)
    _run(
        ss_generate, "--bundle", "bundle", "--adapter", "tiny", "--prompt", "SELECT a", "--max-tokens", "3",
        "--prompt-cache", "cache/text.safetensors", "--dtype", "float32",
    )  # fmt: skip


def _tuning() -> dict:
    """Both kinds of choice, with numbers that nobody measured: so the file is the same every time."""
    from ss_device.draft_choice import DraftChoice
    from ss_device.draft_policy import NUM_CELLS, Experience, StepCosts
    from ss_runtime.tuning import FORMAT_VERSION, AdaptiveChoice, device_name

    costs = StepCosts((1, 2, 4), (0.001, 0.002, 0.003), 0.001)
    adaptive = AdaptiveChoice(4, costs, Experience(100.0, ((1.5, 0.002),) * NUM_CELLS, trust=((5, 0.5),)))
    choices = {"tiny": adaptive, "shared": DraftChoice(4, lookup=True, max_streams=1)}
    evidence = {"costs": {**asdict(costs), "context": 10, "pruned": []}, "candidates": []}
    apps = {
        f"{app}:{dtype}": {"choice": asdict(choice), "evidence": evidence}
        for app, choice in choices.items()
        for dtype in ("float32", "float16")
    }
    return {"format_version": FORMAT_VERSION, "devices": {device_name(): apps}}


def _make_runs() -> None:
    """Continuations and finished runs whose checkpoints a resumed run reads."""
    from ss_device.training.command import main as ss_train

    base = ("--base", "models/base/tiny-base")
    _run(
        ss_train, "distill", "pair", *base, "--data", "data/rows.jsonl", "--output", "data/own.jsonl",
        "--max-tokens", "2", "--batch-size", "4",
    )  # fmt: skip
    _run(ss_train, *ADAPTER_RUN)
    _run(ss_train, *LORA_RUN)
    _run(ss_train, *BASE_RUN)
    _run(
        ss_train, "bigram-bias", "pair=data/own.jsonl", *base, "--output", "cache/bias.safetensors",
        "--rank", "2", "--epochs", "1",
    )  # fmt: skip


def _make_results() -> None:
    from ss_runtime.commands.bench import main as ss_bench

    for name in ("before", "after"):
        _run(
            ss_bench, "run", "bundle", "--adapter", "tiny", "--input", "data/prompts.jsonl", "--limit", "1",
            "--max-tokens", "3", "--methods", "plain,ss", "--output", f"results/{name}.json",
        )  # fmt: skip


def _write_canaries(folder: Path) -> None:
    """Files that no command has any business with: beside the inputs, above them, elsewhere."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / WORK / "models/base/tiny-base/model.safetensors")
    (folder / "canary").mkdir()
    for place in (folder, folder / "canary", folder / WORK / "canary"):
        (place / "canary.txt").write_text("canary\n")
        (place / "canary.json").write_text('{"canary": 1}\n')
        save_file(tensors, place / "canary.safetensors")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
