"""The kinds of files: their format, where they are, and the commands that read them."""

from __future__ import annotations

from dataclasses import dataclass

BUNDLE_READERS = (
    "generate",
    "generate shared",
    "generate executor",
    "generate reference",
    "generate mlxfn",
    "generate coreai",
    "generate base",
    "validate",
    "validate executor",
    "validate mlxfn",
    "bench run",
    "bench tune",
    "bench tune by ranks",
    "audit",
    "convert into all",
    "serve text",
)
MLX_READERS = (
    "generate",
    "generate rows",
    "generate base",
    "validate",
    "bench run",
    "bench tune",
    "serve text",
    "convert into all",
    "generate cache",
    "generate reference",
    "validate record",
)
ADAPTER_READERS = (
    "convert",
    "convert golden",
    "convert coreml",
    "convert over",
    "sizes",
    "train evaluate",
    "train replay",
    "train adapter from",
)
BASE_READERS = (
    "convert",
    "convert golden",
    "convert coreml",
    "train adapter",
    "train lora",
    "train base from",
    "train distill",
    "train evaluate",
    "train score",
    "train bigram bias",
    "train adapter talk",
)
PACKAGE_READERS = (
    "executor",
    "executor text",
    "audit",
    "audit package",
    "generate executor",
    "validate executor",
)
CHAT_READERS = ("generate chat", "serve chat")


@dataclass(frozen=True)
class Kind:
    """Files of one kind. format: `json`, `jsonl`, `toml`, `tensors`, `gzip`, `proto` or `bytes`.

    weight: how often cases of it are drawn.
    """

    format: str
    paths: tuple[str, ...]
    commands: tuple[str, ...]
    weight: float = 1.0


PACKAGE = "bundle/coreml/tiny-base.mlpackage"
ASSET = "bundle/coreai/tiny-base.aimodel"
TINY, SHARED, RUN = "models/adapters/tiny", "models/adapters/shared", "runs/adapter"
TINY_BASE, SHARDED = "models/base/tiny-base", "models/base/sharded-base"
KINDS = {
    "manifest": Kind("json", ("bundle/manifest.json",), BUNDLE_READERS, 3),
    "earlier manifest": Kind("json", ("out/earlier/manifest.json",), ("convert into", "convert over")),
    "adapter config": Kind("json", (f"{TINY}/speculative_config.json",), ADAPTER_READERS[:5], 2),
    "trained adapter config": Kind("json", (f"{RUN}/speculative_config.json",), ADAPTER_READERS[5:]),
    "shared adapter config": Kind("json", (f"{SHARED}/speculative_config.json",), ("convert shared",)),
    "adapter tensors": Kind("tensors", (f"{TINY}/speculative.safetensors",), ADAPTER_READERS[:5], 2),
    "trained adapter tensors": Kind("tensors", (f"{RUN}/speculative.safetensors",), ADAPTER_READERS[5:]),
    "peft config": Kind("json", (f"{SHARED}/adapter_config.json",), ("convert shared",), 0.3),
    "peft tensors": Kind("tensors", (f"{SHARED}/adapter_model.safetensors",), ("convert shared",)),
    "trained lora": Kind(
        "json", ("runs/lora/adapter_config.json", "runs/lora/finetune.json"), ("train score",)
    ),
    "trained lora tensors": Kind("tensors", ("runs/lora/adapter_model.safetensors",), ("train score",)),
    "golden prompts": Kind("jsonl", (f"{TINY}/golden_prompts.jsonl",), ("convert golden",)),
    "base config": Kind("json", (f"{TINY_BASE}/config.json",), BASE_READERS, 2),
    "generation config": Kind(
        "json",
        (f"{TINY_BASE}/generation_config.json",),
        ("convert golden", "train distill", "train score"),
        0.5,
    ),
    "base tokenizer": Kind("json", (f"{TINY_BASE}/tokenizer.json",), BASE_READERS),
    "base tokenizer config": Kind(
        "json",
        (f"{TINY_BASE}/tokenizer_config.json",),
        ("train adapter talk", "convert", "train base from"),
    ),
    "base weights": Kind("tensors", (f"{TINY_BASE}/model.safetensors",), BASE_READERS, 2),
    "shards": Kind(
        "tensors",
        (f"{SHARDED}/model-00001-of-00002.safetensors", f"{SHARDED}/model-00002-of-00002.safetensors"),
        ("convert sharded", "bench drafts"),
    ),
    "shard index": Kind(
        "json", (f"{SHARDED}/model.safetensors.index.json",), ("convert sharded", "bench drafts")
    ),
    "draft config": Kind("json", (f"{SHARDED}/config.json",), ("bench drafts",)),
    "draft tokenizer": Kind(
        "json", (f"{SHARDED}/tokenizer.json", f"{SHARDED}/tokenizer_config.json"), ("bench drafts",), 0.5
    ),
    "packed base": Kind("tensors", ("models/base/packed-base/model.safetensors",), ("convert packed",)),
    "packed base config": Kind("json", ("models/base/packed-base/config.json",), ("convert packed",), 0.5),
    "packed bundle": Kind("tensors", ("packed/mlx/base.safetensors",), ("generate packed",)),
    "bundle weights": Kind("tensors", ("bundle/mlx/base.safetensors",), MLX_READERS),
    "bundle adapter": Kind("tensors", ("bundle/mlx/adapters/tiny.safetensors",), MLX_READERS),
    "bundle shared adapter": Kind(
        "tensors", ("bundle/mlx/adapters/shared.safetensors",), ("generate shared",), 0.5
    ),
    "bundle config": Kind("json", ("bundle/config.json",), ("bench run", "generate"), 0.2),
    "bundle tokenizer": Kind(
        "json",
        ("bundle/tokenizer.json",),
        ("generate", "generate chat", "validate", "serve text", "bench run"),
    ),
    "bundle tokenizer config": Kind("json", ("bundle/tokenizer_config.json",), CHAT_READERS, 2),
    "golden traces": Kind("json", ("bundle/golden/tiny.json",), ("validate", "validate executor"), 2),
    "recorded traces": Kind("json", ("traces/tiny.json",), ("validate traces",), 2),
    "recorded tensors": Kind("tensors", ("traces/tiny.safetensors",), ("validate traces",)),
    "golden tensors": Kind(
        "tensors", ("bundle/golden/tiny.safetensors",), ("validate", "validate executor"), 2
    ),
    "package manifest": Kind("json", (f"{PACKAGE}/Manifest.json",), PACKAGE_READERS),
    "package model": Kind("proto", (f"{PACKAGE}/Data/com.apple.CoreML/model.mlmodel",), PACKAGE_READERS, 3),
    "package weights": Kind(
        "bytes", (f"{PACKAGE}/Data/com.apple.CoreML/weights/weight.bin",), PACKAGE_READERS
    ),
    "core ai program": Kind("bytes", (f"{ASSET}/main.mlirb",), ("generate coreai", "convert into all"), 2),
    "core ai hash": Kind("bytes", (f"{ASSET}/main.hash",), ("generate coreai",), 0.3),
    "core ai metadata": Kind("json", (f"{ASSET}/metadata.json",), ("generate coreai",), 0.5),
    "mlx functions": Kind("bytes", ("bundle/mlxfn/tiny.mlxfn",), ("generate mlxfn", "validate mlxfn"), 2),
    "tuning": Kind(
        "json",
        ("bundle/tuning.json",),
        ("generate", "generate shared", "bench run", "bench tune", "bench plot", "serve text"),
        2,
    ),
    "prompt cache": Kind("tensors", ("cache/text.safetensors",), ("generate cache",), 2),
    "bigram bias": Kind("tensors", ("cache/bias.safetensors",), ("train adapter with bias",)),
    "application": Kind(
        "toml",
        ("apps/pair/app.toml",),
        (
            "train adapter",
            "train base",
            "train distill",
            "train score",
            "train evaluate",
            "train bigram bias",
        ),
        2,
    ),
    "chat application": Kind("toml", ("apps/talk/app.toml",), ("train adapter talk",)),
    "recipe": Kind("toml", ("recipe.toml",), ("train base", "train base resumed", "train base from"), 2),
    "training rows": Kind(
        "jsonl",
        ("data/rows.jsonl",),
        (
            "train adapter",
            "train lora",
            "train base",
            "train distill",
            "train evaluate",
            "train score",
            "train adapter resumed",
        ),
        2,
    ),
    "zipped rows": Kind("gzip", ("data/rows.jsonl.gz",), ("train adapter gzip",)),
    "conversations": Kind("jsonl", ("data/talk.jsonl",), ("train adapter talk",)),
    "continuations": Kind(
        "jsonl",
        ("data/own.jsonl",),
        ("train base", "train distill resumed", "train bigram bias", "train replay"),
    ),
    "continuations settings": Kind(
        "json", ("data/own.jsonl.settings.json",), ("train distill resumed", "train replay")
    ),
    "prompt rows": Kind("jsonl", ("data/prompts.jsonl",), ("generate rows", "bench run", "bench tune")),
    "adapter settings": Kind("json", (f"{RUN}.run/settings.json",), ("train adapter resumed",)),
    "adapter checkpoint record": Kind(
        "json", (f"{RUN}.run/checkpoint/record.json",), ("train adapter resumed",), 1.5
    ),
    "adapter checkpoint": Kind(
        "tensors",
        tuple(
            f"{RUN}.run/{name}.safetensors"
            for name in ("checkpoint/model", "checkpoint/optimizer", "checkpoint/random", "best/model")
        ),
        ("train adapter resumed",),
        2,
    ),
    "lora settings": Kind("json", ("runs/lora.run/settings.json",), ("train lora resumed",), 0.5),
    "base checkpoint record": Kind(
        "json", ("runs/base.run/checkpoint/record.json",), ("train base resumed",)
    ),
    "base checkpoint": Kind(
        "tensors",
        tuple(f"runs/base.run/checkpoint/{name}.safetensors" for name in ("model", "optimizer", "random")),
        ("train base resumed",),
        2,
    ),
    "run logs": Kind(
        "jsonl",
        ("runs/base.run/log.jsonl", f"{RUN}.run/log.jsonl"),
        ("train base resumed", "train adapter resumed"),
        0.5,
    ),
    "bench result": Kind(
        "json",
        ("results/before.json", "results/after.json"),
        ("bench compare", "bench compare text", "bench plot"),
        2,
    ),
    "chat request": Kind("json", ("data/chat.json",), ("serve chat",), 2),
    "text request": Kind("json", ("data/text.json",), ("serve text",), 2),
}
