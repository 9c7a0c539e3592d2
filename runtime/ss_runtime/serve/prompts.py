"""Prompts of requests as token ids, made in a separate thread so as not to block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ss_device.bundle import Bundle
from ss_device.errors import UserError
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.serve.requests import GenerationRequest, bad_request
from ss_runtime.tokenization import load_tokenizer


class PromptReader:
    """Checks, renders and tokenizes prompts.

    context: tokens that a text may have; most_bytes: what is longer cannot fit, as no token of the
    vocabulary stands for more than `most_bytes / context` bytes.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.tokenizer = load_tokenizer(bundle)
        self.chat = ChatPrompt(bundle.path, self.tokenizer)
        self.context = bundle.manifest.architecture.default_context
        vocabulary = self.tokenizer.tokenizer.get_vocab(with_added_tokens=True)
        self.most_bytes = self.context * max(len(token.encode()) for token in vocabulary)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    def close(self) -> None:
        """End the thread; pending work is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable):
        """Run a function in the thread. Long work there must not hold Python's lock for long."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def ids(self, request: GenerationRequest) -> list[int]:
        """Token ids of a request's prompt. Raises RequestError for one that is no text or too long."""
        if isinstance(request.prompt, list):
            return request.prompt
        self._check_length(request)
        try:
            if request.messages is not None:
                return await self.run(partial(self.chat.ids, request.messages))
            return await self.run(partial(self.tokenizer.encode, request.prompt))
        except UserError as error:
            raise bad_request(str(error)) from error

    def _check_length(self, request: GenerationRequest) -> None:
        """Before any work: a megabyte takes the tokenizer half a second."""
        texts = (
            [request.prompt]
            if request.messages is None
            else [text for message in request.messages for text in message.values()]
        )
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if size > self.most_bytes:
            raise bad_request(
                f"the prompt has {size} bytes, the context of {self.context} tokens holds "
                f"at most {self.most_bytes}"
            )
