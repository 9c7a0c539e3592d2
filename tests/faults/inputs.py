"""What the commands under test read: tiny models, rows, a bundle, trained things. Made once."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ss_device.config import SpeculativeConfig
from tests.faults.processes import run

REPOSITORY = Path(__file__).resolve().parents[2]
APP = str(REPOSITORY / "apps" / "sqlctx")
CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1, bigram_rank=2)
SETTINGS = json.dumps({"num_streams": 2, "num_msa_layers": 1, "stream_mlp": "base", "bigram_rank": 2})
SIZES = ("--nodes", "3", "--context", "48", "--chunk", "8")


def make_inputs(folder: Path) -> Path:
    """Fill `folder` (once: a folder that is there is taken as it is)."""
    if not (folder / "made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["SS_APPS"] = str(REPOSITORY / "apps")
        for step in (_models, _texts, _bundle, _adapter, _base, _traces):
            finished = run(lambda step=step: step(folder), folder)
            if finished.status:
                raise RuntimeError(f"{step.__name__}: {finished.err}")
        (folder / "made").touch()
    return folder


def _models(folder: Path) -> None:
    """A base of two layers, adapters `one`, `two` and `three`, rows, prompts, a recipe."""
    from ss_device.adapter import save_adapter
    from tests.tiny_models import TINY_RECIPE, make_tiny_base, random_adapter

    base = make_tiny_base(
        folder / "models" / "base" / "tiny-base", dtype="float16", num_hidden_layers=2, hidden_size=16,
        intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    for seed, app in enumerate(("one", "two", "three")):
        adapter = random_adapter(base, CONFIG, seed=seed, app=app)
        save_adapter(adapter, base.architecture, folder / "models" / "adapters" / app)
    rows = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(12)]
    for name in ("rows.jsonl", "data/rows.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "prompts.jsonl").write_text('{"prompt": "SELECT a"}\n')
    (folder / "recipe.toml").write_text(TINY_RECIPE.replace("[training]\n", "[training]\nsteps = 4\n"))


def _texts(folder: Path) -> int:
    from ss_device.training.command import main

    base, rows, output = (str(folder / n) for n in ("models/base/tiny-base", "rows.jsonl", "own.jsonl"))
    return main(["distill", APP, "--base", base, "--data", rows, "--output", output, "--max-tokens", "6"])


def _bundle(folder: Path) -> int:
    """`bundle` for both targets; for MLX alone `mlx_bundle`, with traces `golden_bundle`, of two adapters
    `pair_bundle`."""
    from ss_convert.command import main

    one, mlx, bare = ("--adapter", "one"), ("--target", "mlx"), ("--no-golden",)
    traces = ("--golden-prompts", str(folder / "prompts.jsonl"))

    def convert(name: str, *words: str) -> int:
        return main(["--models", str(folder / "models"), *SIZES, "--output", str(folder / name), *words])

    return max(
        convert("bundle", *one, *bare),
        convert("mlx_bundle", *one, *mlx, *bare),
        convert("golden_bundle", *one, *mlx, *traces),
        convert("pair_bundle", *one, "--adapter", "two", *mlx, *bare),
    )


def _traces(folder: Path) -> int:
    """`traces`: recorded with prompts that nothing else uses."""
    from ss_runtime.commands.validate import main

    (folder / "other.jsonl").write_text('{"prompt": "b"}\n{"prompt": "c"}\n')
    words = ("--record", str(folder / "traces"), "--prompts", str(folder / "other.jsonl"))
    return main([str(folder / "mlx_bundle"), *words])


def _adapter(folder: Path) -> int:
    from ss_device.training.command import main

    return main(["adapter", APP, "--base", str(folder / "models/base/tiny-base"), "--data",
                 str(folder / "own.jsonl"), "--settings", SETTINGS, "--output", str(folder / "adapter"),
                 "--epochs", "1", "--tokens-per-batch", "256"])  # fmt: skip


def _base(folder: Path) -> int:
    from ss_device.training.command import main

    return main(["base", str(folder / "recipe.toml"), "--data", str(folder / "data"), "--output",
                 str(folder / "base"), "--checkpoint-minutes", "0"])  # fmt: skip
