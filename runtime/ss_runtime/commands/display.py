"""Drawing generation step by step: what was drafted and accepted, and what the model wrote itself.

One line per model call, as in the papers' Fig. 11. Colour is never the only mark:

    call  nodes  new
       1     32    4  ⟦ COUNT(*) FROM⟧ head
"""

from __future__ import annotations

import sys

from rich.text import Text

from ss_device.command_line import console
from ss_runtime.generation import GenerationStep, Result
from ss_runtime.tokenization import BundleTokenizer

ACCEPTED, OWN, DIM = "green underline", "bold", "dim"


def marks() -> tuple[str, str, str, str]:
    """Opening and closing mark of accepted drafts, end of text, line break; ASCII where need be."""
    try:
        "⟦⟧■⏎".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "[[", "]]", "<end>", "\\n"
    return "⟦", "⟧", "■", "⏎"


class StepPrinter:
    """Prints one generation's calls as they happen. Write the prefill's record first."""

    def __init__(self, tokenizer: BundleTokenizer) -> None:
        self._console = console()
        self._open, self._close, self._end, self._break = marks()
        self._writer = tokenizer.detokenizer()
        self._calls = 0

    def legend(self) -> None:
        """What the marks mean, and the columns."""
        text = Text("each line is one model call: ", DIM)
        text.append(f"{self._open}accepted draft tokens{self._close}", ACCEPTED)
        text.append(" the model's own token", OWN)
        self._print(text)
        self._print(Text("call  nodes  new", DIM))

    def step(self, record: GenerationStep) -> None:
        """One line for one call."""
        tree = record.step.tree
        nodes = "prompt" if tree is None else str(tree.num_nodes)
        line = Text(f"{self._calls:>4} {nodes:>6} {len(record.tokens):>4}  ", DIM)
        if drafted := self._text(record.tokens[: record.num_drafted]):
            line.append(self._open + drafted + self._close, ACCEPTED)
        line.append(self._text(record.tokens[record.num_drafted :]), OWN)
        if record.finish_reason == "stop":
            line.append(f" {self._end}", DIM)
        self._print(line)
        self._calls += 1

    def totals(self, records: list[GenerationStep], result: Result) -> None:
        """Tokens, calls and the share of drafted tokens."""
        self._print(Text(totals_text(records, result), DIM))

    def _text(self, tokens) -> str:
        text = "".join(self._writer.add(token) for token in tokens).replace("\n", self._break)
        # A control character would move the cursor of the terminal.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


def totals_text(records: list[GenerationStep], result: Result) -> str:
    """One line: tokens, model calls, tokens per call, drafted share, times in seconds; a lossy choice."""
    drafted = sum(record.num_drafted for record in records)
    count = result.generated_tokens
    per_call = f", {result.tokens_per_call:.2f} tokens per call" if result.tokens_per_call else ""
    seconds, epsilon = result.seconds, result.lossy_typical
    lossy = f"; LOSSY: typical acceptance {epsilon:g}" if epsilon else ""
    return (
        f"{count} tokens, {result.steps} calls after the prompt's{per_call}; "
        f"{drafted} drafted ({100 * drafted / count:.0f} %); "
        f"prefill {seconds['prefill']:.2f} s, decode {seconds['decode']:.2f} s{lossy}"
    )
