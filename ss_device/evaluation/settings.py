"""Settings of the commands that measure; their fields are options of `ss-train` (ss_device/settings.py).

Nothing here loads PyTorch, so that `ss-train --help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ss_device.application import Application
from ss_device.command_line import positive
from ss_device.config import PRUNE_OVER
from ss_device.decoding import SHAPES
from ss_device.draft_choice import DraftChoice
from ss_device.settings import setting


@dataclass(frozen=True)
class PromptSettings:
    """Which test prompts are answered, and how long the answers may be."""

    limit: int = setting(200, help="number of rows", parse=positive)
    max_tokens: int | None = setting(
        None, help="longest answer in tokens (default: the application's)", parse=positive
    )
    longest_prompt: int | None = setting(None, help="leave out longer prompts (tokens)", parse=positive)

    def longest_answer(self, app: Application) -> int:
        """Tokens that an answer may have."""
        return self.max_tokens or app.max_tokens


@dataclass(frozen=True)
class EvaluationSettings(PromptSettings):
    """What `ss-train evaluate` decodes, and with which tree. app: its name (None: the adapter's)."""

    app: str | None = setting(None, help="application (default: the adapter's)", metavar="APP")
    num_nodes: int = setting(32, help="tree nodes per call", flag="--nodes", parse=positive)
    num_kept: int | None = setting(
        None, help="prune to this many nodes by early exit", flag="--keep", parse=positive
    )
    shape: str = setting("best-first", help="how the tree is grown", choices=SHAPES)
    tree_top_k: int = setting(3, help="children per node of a k-ary tree", parse=positive)
    prune_over: str = setting(
        "draft", help="what early-exit scores are normalised over", choices=PRUNE_OVER
    )


@dataclass(frozen=True)
class ReplaySettings(PromptSettings):
    """Which prompts are replayed under which trees."""

    trees: tuple[DraftChoice, ...] = (DraftChoice(32),)


@dataclass(frozen=True)
class ScoreSettings(PromptSettings):
    """What is scored: the base alone, or with a plain LoRA."""

    lora: Path | None = setting(None, help="PEFT folder (default: the base alone)", metavar="FOLDER")
    batch_size: int = setting(32, help="prompts at a time", parse=positive)
