"""ss-train: base pre-training, self-distillation, adapters, evaluation (`commands`)."""

from __future__ import annotations

from ss_device.command_line import CommandParser, run_command
from ss_device.python_api import bound_cpu_caches
from ss_device.training.commands import (
    adapter,
    base,
    bigram_bias,
    distill,
    evaluate,
    lora,
    replay,
    score,
)

DESCRIPTION = "Train base models and speculative adapters, and measure them."
COMMANDS = (base, distill, bigram_bias, adapter, lora, evaluate, replay, score)


def main(argv: list[str] | None = None) -> int:
    bound_cpu_caches()
    return run_command(build_parser(), lambda arguments: arguments.run(arguments), argv)


def build_parser() -> CommandParser:
    parser = CommandParser(prog="ss-train", description=DESCRIPTION, example=adapter.EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":  # accelerate launch -m ss_device.training.command ...
    raise SystemExit(main())
