"""Base models by their id on the Hugging Face hub: the files that a base folder needs, from its cache."""

from __future__ import annotations

import re
from pathlib import Path

from ss_device.errors import UserError, one_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ("*.safetensors", "*.json", "tokenizer*", "*.jinja")
# Other layouts of the same weights (Meta's, Mistral's, ONNX) lie in subfolders or have this name.
LEFT_OUT = ("*/*", "consolidated*")


def is_hub_id(name: Path | str) -> bool:
    """Whether a name that is no local folder can be an id on the hub (`organisation/model`)."""
    return HUB_ID.fullmatch(str(name)) is not None


def download_base(name: str) -> Path:
    """Folder of the model's newest files in the hub's cache, fetched where they are not there yet.

    Only safetensors, JSON and tokenizer files. Without a connection a complete copy in the cache is taken.
    Raises UserError for an unknown, private or gated model and where the hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
    except ImportError as error:
        raise UserError(
            f"{name}: no such base model folder (pip install huggingface_hub to take it from the hub)"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), ignore_patterns=list(LEFT_OUT)))
    except GatedRepoError as error:
        raise UserError(
            f"{name}: a gated model; accept its terms on its page and log in (hf auth login)"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{name}: no such base model folder, and no such model on the hub (or a private one: hf auth "
            f"login)"
        ) from error
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            f"{name}: no such base model folder, and the hub provided no copy ({one_line(error)})"
        ) from error
