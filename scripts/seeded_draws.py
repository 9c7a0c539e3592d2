"""How often rounding changes a seeded draw: this project's rule, the same on rounded numbers, and a race.

    python -m scripts.seeded_draws --draws 20000

A step with drafts computes the same logits as one without but for rounding. Two sets of logits that differ
by noise of a given size are drawn from with the same random numbers; counted is how often the tokens
differ: as this project draws (inverse transform in token order), on probabilities or logits that were
rounded before, and by a Gumbel race (a number per token; the largest log p + g wins).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np

from ss_device.sampling import Sampling, draw

SAMPLING = Sampling(temperature=0.8, top_p=0.95)
SPREAD = 3.0
"""Standard deviation of the logits: some tens of tokens survive top-p 0.95 then."""


def rules(uniform: float, gumbel: np.ndarray) -> dict[str, Callable[[np.ndarray], int]]:
    """Rules that draw a token from logits [V] with given random numbers."""

    def rounded(values: np.ndarray, bits: int) -> np.ndarray:
        return np.round(values * 2.0**bits) / 2.0**bits

    def race(logits: np.ndarray) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(SAMPLING.probabilities(logits)) + gumbel))

    return {
        "inverse transform": lambda z: draw(SAMPLING.probabilities(z), uniform),
        "probabilities to 16 bits": lambda z: draw(rounded(SAMPLING.probabilities(z), 16), uniform),
        "logits to 2^-8": lambda z: draw(SAMPLING.probabilities(rounded(z, 8)), uniform),
        "logits to 2^-4": lambda z: draw(SAMPLING.probabilities(rounded(z, 4)), uniform),
        "Gumbel race": race,
    }


def count_changes(draws: int, noise: float, vocab_size: int, seed: int) -> dict[str, int]:
    """Draws that the noise changed, by rule."""
    rng, changed = np.random.default_rng(seed), {}
    for _ in range(draws):
        logits = rng.normal(size=vocab_size) * SPREAD
        other = logits + rng.normal(size=vocab_size) * noise
        for name, rule in rules(rng.random(), rng.gumbel(size=vocab_size)).items():
            changed[name] = changed.get(name, 0) + (rule(logits) != rule(other))
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--noise", type=float, default=1e-3, help="standard deviation, in logits")
    parser.add_argument("--vocab-size", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    print(json.dumps(count_changes(a.draws, a.noise, a.vocab_size, a.seed), indent=1))


if __name__ == "__main__":
    main()
