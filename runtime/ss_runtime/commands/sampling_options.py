"""Options of a command that say how tokens are chosen."""

from __future__ import annotations

import argparse

from ss_device.sampling import Sampler
from ss_runtime.samplers import PENALTIES, build_sampler


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options that `sampler_from_options` reads."""
    group = parser.add_argument_group("sampling (default: greedy)")
    add = group.add_argument
    add("--temp", type=float, default=0.0, metavar="T", help="above 0: sample (default: 0, greedy)")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that reach P together")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add(
        "--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest one's probability"
    )
    add("--seed", type=int, metavar="N", help="the same seed gives the same text, with drafts or without")
    for name in PENALTIES:
        add(f"--{name}-penalty", type=float, metavar="X", help=f"mlx-lm's {name} penalty")
    add(
        "--lossy-typical",
        type=float,
        metavar="EPSILON",
        help="LOSSY: accept drafts that are merely typical (Medusa's rule, e.g. 0.09; delta is its square "
        "root); changes the text",
    )


def sampler_from_options(arguments: argparse.Namespace) -> Sampler | None:
    """The sampler that a command line asks for; None is greedy. Raises UserError for bad values."""
    settings = {
        name: value
        for name, value in (
            ("top_p", arguments.top_p),
            ("top_k", arguments.top_k),
            ("min_p", arguments.min_p),
            ("seed", arguments.seed),
        )
        if value is not None
    }
    penalties = {name: getattr(arguments, f"{name}_penalty") for name in PENALTIES}
    return build_sampler(arguments.temp, settings, penalties, arguments.lossy_typical)
