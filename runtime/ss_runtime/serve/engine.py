"""One generation at a time: a worker thread that owns the models, and a bounded queue before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from ss_device.bundle import Bundle
from ss_device.decoding import check_request
from ss_device.errors import UserError, one_line
from ss_runtime.drafts import choose_drafts
from ss_runtime.generation import GenerationStep, generate_steps, lossy_epsilon
from ss_runtime.resident_adapters import ResidentAdapters
from ss_runtime.samplers import build_sampler
from ss_runtime.serve.prompts import PromptReader
from ss_runtime.serve.requests import GenerationRequest, RequestError, bad_request
from ss_runtime.serve.settings import ServeSettings
from ss_runtime.settings import FUNCTION_BACKENDS, SERVING_BACKENDS, DraftSettings, RuntimeSettings


class ClientGone(Exception):
    """The client no longer waits for the answer."""


@dataclass
class Usage:
    """What a generation took, counted while it runs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    drafted: int = 0
    seconds: float = 0.0
    lossy_typical: float | None = None

    def add(self, record: GenerationStep) -> None:
        self.completion_tokens += len(record.tokens)
        self.calls += record.step.tree is not None
        self.drafted += record.num_drafted

    def to_dict(self, with_cached: bool = False) -> dict:
        """OpenAI's `usage`; `speculation` is this project's addition.

        with_cached: also what tells of prompts that others sent before, cached tokens and seconds.
        """
        after_first = self.completion_tokens - 1
        found = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {"accepted_prediction_tokens": self.drafted},
            "speculation": {
                "model_calls": self.calls,
                "tokens_per_call": round(after_first / self.calls, 4) if self.calls else None,
                "lossy_typical": self.lossy_typical,
            },
        }
        if with_cached:
            found["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
            found["speculation"]["seconds"] = round(self.seconds, 4)
        return found


class Engine:
    """The bundle's adapters and the queue. Everything that touches a model runs in the one worker thread.

    Beyond `settings.queue` requests that wait while another one runs, one more gets 429. Where nothing is
    said of drafts an adapter drafts as `ss-bench tune` chose on this device, where it did. forget_prompts:
    every prompt is computed from its beginning. runtime: back end None is MLX.
    """

    def __init__(
        self,
        bundle: Bundle,
        runtime: RuntimeSettings | None = None,
        drafts: DraftSettings | None = None,
        settings: ServeSettings | None = None,
        forget_prompts: bool = False,
    ) -> None:
        settings = settings or ServeSettings()
        self.bundle, self.queue, self._forget_prompts = bundle, settings.queue, forget_prompts
        self._drafts = drafts or DraftSettings()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation")
        self._turn = asyncio.Lock()
        self._present = 0
        self._end: float | None = None
        self.prompts = PromptReader(bundle)
        build_sampler(1.0, {}, {"repetition": 1.1})  # imports now what such a request would wait for
        self.started = int(time.time())
        runtime = runtime or RuntimeSettings()
        self.bank = self._worker.submit(self._open_bank, runtime, settings.adapters).result()
        self.untuned: list[str] = []  # adapters whose drafts were not chosen for this device
        # An adaptive drafter learns over requests. All are made now: what was tuned may be unreadable.
        self._drafters = {name: self._new_drafter(self.bank.activate(name)) for name in self.bank.models}

    def _open_bank(self, runtime: RuntimeSettings, names: Sequence[str] | None) -> ResidentAdapters:
        if runtime.backend in FUNCTION_BACKENDS:
            from ss_runtime.function_bank import FunctionBank

            return FunctionBank(self.bundle, runtime, names)
        if runtime.backend not in (None, "mlx"):
            known = ", ".join(SERVING_BACKENDS)
            raise UserError(f"a server does not run on back end '{runtime.backend}' (known: {known})")
        from ss_runtime.mlx.adapter_bank import AdapterBank

        return AdapterBank(self.bundle, runtime, names)

    def close(self) -> None:
        """Wait for the running model call and end the threads."""
        self.prompts.close()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def end_soon(self, seconds: float) -> None:
        """Running answers may go on for so long and then end between two calls; others get 503.

        May be called from a signal handler.
        """
        self._end = time.monotonic() + seconds

    def _check_end(self, running: bool) -> None:
        if self._end is not None and not (running and time.monotonic() < self._end):
            raise RequestError(503, "server_error", "the server is shutting down")

    @property
    def runs_on(self) -> dict[str, str]:
        """Back end and dtype, as answers tell them."""
        return {"backend": self.bank.settings.backend, "dtype": self.bank.settings.dtype}

    @property
    def present(self) -> int:
        """Requests that run, wait or have their prompt read."""
        return self._present

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue. Raises RequestError 429 when it is full."""
        if self._present > self.queue:
            raise RequestError(
                429, "rate_limit_error", f"{self.queue} requests are waiting: try again later"
            )
        self._present += 1
        try:
            yield
        finally:
            self._present -= 1

    @asynccontextmanager
    async def turn(self, left: Callable[[], Awaitable] | None = None) -> AsyncIterator[None]:
        """The turn to use the models. left: returns once nobody waits for the answer any more.

        Raises RequestError 503 once the server ends; ClientGone when `left` returned before the turn came.
        """
        await self._take_turn(left)
        try:
            self._check_end(running=False)
            yield
        finally:
            self._turn.release()

    async def _take_turn(self, left: Callable[[], Awaitable] | None) -> None:
        """Wait for the turn, or raise ClientGone when `left` returns first."""
        if left is None:
            await self._turn.acquire()
            return
        turn, gone = asyncio.ensure_future(self._turn.acquire()), asyncio.ensure_future(left())
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
        except BaseException:
            turn.cancel()
            with suppress(asyncio.CancelledError):
                await turn
                self._turn.release()  # both came at once
            raise
        finally:
            gone.cancel()

    async def run(self, function: Callable):
        """Run a function in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def prepare(self, request: GenerationRequest) -> tuple[str, list[int], int]:
        """The adapter's name, prompt ids and token limit. Raises RequestError for what cannot be run."""
        resident = self.resident(request.model)
        ids = await self.prompts.ids(request)
        limit = request.max_tokens or resident.adapter.max_tokens
        try:
            check_request(resident.model.limits, 1, len(ids), limit, request.sampler)
        except UserError as error:
            raise bad_request(str(error)) from error
        return resident.adapter.app, ids, limit

    def resident(self, name: str | None):
        """The named model. Raises RequestError 404 when it is not loaded (any more)."""
        try:
            return self.bank.activate(name)
        except UserError as error:
            raise RequestError(404, "model_not_found", str(error)) from error

    async def change(self, name: str, load: bool, left: Callable[[], Awaitable] | None = None) -> None:
        """Load or unload an adapter between two generations. Raises RequestError 404 for an unknown one.

        left: as in `turn`.
        """
        with self.place():
            async with self.turn(left):
                await self._change(name, load)

    async def _change(self, name: str, load: bool) -> None:
        try:
            await self.run(partial(self._load if load else self._unload, name))
        except UserError as error:
            raise RequestError(404, "model_not_found", one_line(error)) from error

    def _load(self, name: str) -> None:
        known = name in self.bank.names
        resident = self.bank.load(name)
        try:
            if not known:
                self._drafters[name] = self._new_drafter(resident)
        except UserError as error:
            self.bank.unload(name)
            raise RequestError(500, "server_error", one_line(error)) from error

    def _unload(self, name: str) -> None:
        self.bank.unload(name)
        del self._drafters[name]

    def _new_drafter(self, resident):
        """As requested, else as tuned on this device; the base alone has no streams, only prompt lookup."""
        adapter = resident.adapter
        drafts = self._drafts.within(adapter)
        on = self.bank.settings
        chosen = choose_drafts(
            self.bank.bundle, adapter, drafts, resident.bigram_bias, on.dtype, on.backend
        )
        if chosen.num_kept:
            resident.model.keep(chosen.num_kept)
        if chosen.untuned:
            self.untuned.append(adapter.app)
        return chosen.drafter

    async def generate(
        self, request: GenerationRequest, name: str, ids: list[int], limit: int, usage: Usage
    ) -> AsyncIterator[GenerationStep]:
        """Records of one generation, as `prepare` described it; the caller holds the turn.

        Leaving the loop early ends the work after the model call that runs.
        """
        resident = self.resident(name)
        steps = generate_steps(
            resident.model,
            self._drafters[name],
            ids,
            limit,
            frozenset(self.bundle.manifest.architecture.eos_ids),
            (*resident.adapter.stop_strings, *request.stop_strings),
            self.prompts.tokenizer,
            request.sampler,
        )
        if self._forget_prompts:
            await self.run(partial(resident.model.text.trim, 0))
        usage.prompt_tokens, usage.lossy_typical = len(ids), lossy_epsilon(request.sampler)
        try:
            while True:
                start = time.perf_counter()
                record = await self.run(lambda: next(steps, None))
                usage.seconds += time.perf_counter() - start
                if record is None:
                    return
                usage.cached_tokens = resident.model.reused
                usage.add(record)
                yield record
                if record.finish_reason is None:
                    self._check_end(running=True)
        finally:
            # After the running call, in the same thread; nobody waits for it.
            with suppress(RuntimeError):  # closed already: nobody will use the models any more
                self._worker.submit(steps.close)
