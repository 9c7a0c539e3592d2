"""A bundle's tokenizer: encoding of prompts, and text of a growing list of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ss_device.bundle import Bundle
from ss_device.errors import UserError, one_line
from ss_device.token_ids import outside_text, outside_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INCOMPLETE = "\ufffd"  # what decoding puts in place of a cut UTF-8 character


class BundleTokenizer:
    """`tokenizers.Tokenizer` with this project's rules: BOS comes first, special tokens are no text.

    vocab_size: rows of the model's embedding. The tokenizer may know more tokens, which are refused in a
    prompt, or fewer: an id that it does not know is no text.
    """

    def __init__(self, tokenizer: Tokenizer, bos_id: int | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.bos_id, self.vocab_size = bos_id, vocab_size

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, after BOS where the base has one.

        UserError for half a surrogate pair and for text whose token has no row in the embedding.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt is not Unicode text: {one_line(error)}") from error
        # The form for batches lets other threads run meanwhile.
        ids = self.tokenizer.encode_batch_fast([prompt], add_special_tokens=False)[0].ids
        if found := outside_vocabulary(ids, self.vocab_size):
            text = self.tokenizer.id_to_token(found[0])
            raise UserError(f"the prompt: {outside_text(found[0], self.vocab_size, text)}")
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)


class Detokenizer:
    """Text of tokens as they arrive, never half a UTF-8 character.

    A token's text may depend on the one before it (leading spaces) and a character may span tokens, so a
    window of the last settled tokens and the open ones is decoded, and only what is new is handed out.
    """

    def __init__(self, tokenizer: BundleTokenizer) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []
        self._open: list[int] = []

    def add(self, token: int) -> str:
        """The text that became certain with `token`; may be empty."""
        self._open.append(token)
        text = self._new_text()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._settled, self._open = self._open, []
        return text

    def finish(self) -> str:
        """The text of what is still open; a cut character reads as U+FFFD, as in a whole decode."""
        text, self._open = self._new_text(), []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._settled)
        return self._tokenizer.decode(self._settled + self._open)[len(before) :]


def load_tokenizer(bundle: Bundle) -> BundleTokenizer:
    """The tokenizer of a bundle. Raises UserError when tokenizer.json is missing or unreadable."""
    from ss_device.tokenizer_file import read_tokenizer

    architecture = bundle.manifest.architecture
    return BundleTokenizer(read_tokenizer(bundle.path), architecture.bos_id, architecture.vocab_size)
