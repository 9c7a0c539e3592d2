"""The same draft in every step, as data: what `--tree` names and what tuning.json holds."""

from __future__ import annotations

from dataclasses import dataclass

from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_device.tree import BigramBias

LOOKUP = "+lookup"


@dataclass(frozen=True)
class DraftChoice:
    """Nodes per call (1: plain decoding), shape (`Drafter`), prompt lookup or none.

    max_streams: draft with the first γ' streams alone. num_kept: nodes that are kept by pruning (None: all,
    whatever the model's own limit is). The fields are tuning.json's keys.
    """

    num_nodes: int
    shape: str = "best-first"
    lookup: bool = False
    max_streams: int | None = None
    num_kept: int | None = None

    @staticmethod
    def parse(text: str) -> DraftChoice:
        """`SHAPE:NODES`, or `:STREAMS` behind it to draft with fewer streams: `best-first:32`, `chain:5:2`.

        After a shape, `+lookup` lets n-grams of prompt and output compete for the nodes:
        `best-first+lookup:12:2`. Raises UserError for anything else.
        """
        shape, *numbers = text.split(":")
        if len(numbers) not in (1, 2) or not all(n.isdigit() and int(n) > 0 for n in numbers):
            raise UserError(f"tree '{text}' is not SHAPE:NODES or SHAPE:NODES:STREAMS, as best-first:32")
        nodes, streams = int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else None
        choice = DraftChoice(nodes, shape.removesuffix(LOOKUP), shape.endswith(LOOKUP), streams)
        choice.drafter(None)
        return choice

    def __str__(self) -> str:
        """What `parse` reads. It has no word for `num_kept`."""
        streams = f":{self.max_streams}" if self.max_streams else ""
        return f"{self.shape}{LOOKUP * self.lookup}:{self.num_nodes}{streams}"

    def label(self) -> str:
        """For tables: `plain`, `12 best-first 2 streams +lookup, 8 kept`."""
        if self.num_nodes == 1:
            return "plain"
        streams = f" {self.max_streams} streams" if self.max_streams else ""
        kept = f", {self.num_kept} kept" if self.num_kept else ""
        return f"{self.num_nodes} {self.shape}{streams}" + f" {LOOKUP}" * self.lookup + kept

    def drafter(self, bigram_bias: BigramBias | None) -> Drafter:
        """What draws these trees. Raises UserError for a draft that cannot be drawn."""
        return Drafter(
            self.num_nodes,
            self.shape,
            bigram_bias=bigram_bias,
            max_streams=self.max_streams,
            lookup=PromptLookup() if self.lookup else None,
        )
