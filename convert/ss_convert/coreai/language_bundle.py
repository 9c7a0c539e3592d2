"""What Apple's loader of language models wants beside an asset with `main` (`plain_function.py`).

`LanguageBundle` (`LanguageModelBundle` since) of `apple/coreai-models` is given a folder:

    metadata.json    schema 0.2: what the model is, its asset, sizes, functions and states
    tokenizer/       the tokenizer as Hugging Face has it
    NAME.aimodel

Nothing in it depends on when or where it was written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ss_convert.coreai.plain_function import KEYS, MAIN, VALUES
from ss_device.base_model import TOKENIZER_FILES, BaseFolder
from ss_device.bundle import MANIFEST
from ss_device.chat_template import TEMPLATE_FILE

METADATA, TOKENIZER = "metadata.json", "tokenizer"
VERSION = "0.2"
# config.json: their tokenizer library finds the class in it where tokenizer_config.json names none.
COPIED = (*TOKENIZER_FILES, TEMPLATE_FILE, "chat_template.json", "config.json")


def write_language_bundle(asset: Path, base: BaseFolder, context: int) -> None:
    """Write metadata and tokenizer beside the asset.

    base: what `main` is of, whose tokenizer files are copied as far as it has them; context: the most
    positions that `main` takes.
    """
    metadata = {
        "metadata_version": VERSION,
        "kind": "llm",
        "name": asset.stem,
        "assets": {MAIN: asset.name},
        "language": {
            "tokenizer": base.identity.name,
            "vocab_size": base.architecture.vocab_size,
            "max_context_length": context,
            "embedded_tokenizer": True,
            "function_map": {MAIN: [MAIN]},
            "states": {KEYS: "kv_cache", VALUES: "kv_cache"},
        },
        # Theirs to keep, ours to read: where the adapters' functions are described.
        "user_data": {"ss_device_manifest": f"../{MANIFEST}", "base_sha256": base.identity.sha256},
    }
    folder = asset.parent
    (folder / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    (folder / TOKENIZER).mkdir(exist_ok=True)
    for name in COPIED:
        if (base.path / name).is_file():
            shutil.copyfile(base.path / name, folder / TOKENIZER / name)
