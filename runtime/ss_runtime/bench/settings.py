"""What `ss-bench` measures, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ss_device.command_line import positive
from ss_device.errors import UserError
from ss_device.outputs import check_new_file
from ss_device.settings import setting
from ss_runtime.bench.plots import check_plot_file


@dataclass(frozen=True)
class BenchPrompts:
    """What is decoded. limit: rows; max_tokens: None: the application's."""

    adapter: str | None = setting(
        metavar="NAME", help="which of the bundle's adapters (default: the only one)"
    )
    input: Path | None = setting(
        metavar="FILE",
        help="JSON lines with prompts or rows; {app} stands for the name of every adapter of the bundle in "
        "turn (in --output and --plot too). tune can do without: the adapter's recorded rank statistics "
        "are then used",
    )
    limit: int | None = setting(parse=positive, help="only the first N rows")
    max_tokens: int | None = setting(parse=positive, help="default: the application's")


@dataclass(frozen=True)
class BenchSettings:
    """How methods are compared, and where the result goes."""

    methods: str = setting(
        "plain,ss,ss-lookup,prompt-lookup",
        metavar="LIST",
        help="comma-separated: plain, ss, ss-lookup, ss-tuned, prompt-lookup (this runtime), mlx-lm, "
        "mlx-lm-draft, hf, hf-prompt-lookup, hf-assisted (default: %(default)s)",
    )
    base: Path | None = setting(metavar="DIR", help="the base's Hugging Face folder, for mlx-lm")
    draft: Path | None = setting(metavar="DIR", help="a small model's folder, for draft-model methods")
    draft_tokens: int = setting(
        2,
        parse=positive,
        metavar="K",
        help="tokens that mlx-lm-draft's small model writes ahead (default: %(default)s, mlx-lm's own)",
    )
    repeat: int = setting(1, parse=positive, help="rounds over the prompts")
    output: Path | None = setting(metavar="FILE", help="write JSON here and Markdown beside it")
    plot: Path | None = setting(metavar="FILE", help="write a picture (needs matplotlib)")
    force: bool = setting(False, help="replace existing files")

    def method_names(self) -> list[str]:
        """Raises UserError for a method that does not exist."""
        from ss_runtime.bench.methods import METHODS

        names = [name.strip() for name in self.methods.split(",")]
        if unknown := [name for name in names if name not in METHODS]:
            raise UserError(f"unknown method '{unknown[0]}' (known: {', '.join(METHODS)})")
        return list(dict.fromkeys(names))

    def check_outputs(self) -> None:
        """Refuse what could not be written in the end; folders of results are made."""
        for path in filter(None, (self.output, self.plot)):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_new_file(path, self.force)
        if self.plot:
            check_plot_file(self.plot)
