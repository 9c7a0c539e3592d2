"""`ss-bench tune`: which draft pays on this device, plain decoding among the candidates.

Three measurements are put together. Seconds of a step per tree size, and of the streams' own pass, from
steps timed in turns at one context length. What the model says and what its streams draft at every
position of the prompts' own answers, recorded once. Tokens per call and the host's seconds of drafting
from replaying that record under every candidate: no candidate needs the model again. Pruned steps are
timed too; where they could win if they lost no draft, the model says what they accept.

Without prompts tokens per call come from the adapter's recorded rank statistics (`recorded_ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ss_device.decoding import decode
from ss_device.draft_choice import DraftChoice
from ss_device.draft_policy import NUM_CELLS, AdaptiveDrafter, Experience, StepCosts
from ss_device.step_model import Proposal, StepLimits, StepModel, Verified
from ss_device.tree import DraftTree, root_only, tree_from_parents
from ss_runtime.bench.pruning import decoded_tokens_per_call, measure_pruned
from ss_runtime.bench.recorded_ranks import path_shares, predicted_tokens_per_call
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.tuning import AdaptiveChoice

BLANK_CONTEXT = 256  # tokens behind which steps are timed where no prompt says how long texts are
SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64)


def tree_sizes(num_nodes: int) -> list[int]:
    """Tree sizes that are measured: 1, the known ones below the bundle's nodes, and those."""
    return sorted({1, num_nodes, *(size for size in SIZES if size < num_nodes)})


def candidates(num_nodes: int, num_streams: int) -> list[DraftChoice]:
    """Plain decoding, every shape at every size, and half of the streams."""
    found = [DraftChoice(1)]
    for size in tree_sizes(num_nodes)[1:]:
        for lookup in (False, True):
            found += [DraftChoice(size, "best-first", lookup), DraftChoice(size, "chain", lookup)]
        if num_streams > 1:
            found.append(DraftChoice(size, "best-first", True, num_streams // 2))
    return found


def measure_costs(model: StepModel, num_nodes: int, context: int, rounds: int) -> StepCosts:
    """Median seconds behind `context` tokens: per tree size, in turns, and of the streams' own pass.

    A model that computes streams in every step has no pass of their own: 0 seconds.
    """
    defers = model.limits.defers_streams
    options = {"defer": True} if defers else {}
    model.prefill([1] * context)
    sizes = tree_sizes(num_nodes)
    trees = {n: tree_from_parents([1] * n, [-1] + [0] * (n - 1)) for n in sizes}
    taken: dict[int, list[float]] = {n: [] for n in [*sizes, 0]}  # 0: the streams
    for round_number in range(rounds + 1):
        for size in sizes if round_number % 2 else sizes[::-1]:
            seconds = _seconds(lambda n=size: model.step(trees[n], **options))
            if round_number:  # the first round warms up
                taken[size].append(seconds)
        if defers:
            model.commit([0])
            taken[0].append(_seconds(model.streams))
    streams = float(np.median(taken.pop(0))) if defers else 0.0
    medians = [float(np.median(taken[size])) for size in sizes]
    return StepCosts(tuple(sizes), tuple(np.maximum.accumulate(medians).tolist()), streams)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Recording:
    """A prompt's own answer. tokens: generated ids; stream_logits: float16 [tokens, γ, V], of the position
    that decided each."""

    prompt: list[int]
    tokens: list[int]
    stream_logits: np.ndarray


def record(model: StepModel, prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int]) -> Recording:
    """Decode plainly and keep every position's streams: γ · V · 2 bytes per token."""
    proposal = model.prefill(list(prompt))
    tokens, drafts = [proposal.root], [proposal.stream_logits]
    limit = min(max_tokens, model.limits.context - len(prompt) + 1)
    while tokens[-1] not in stop_ids and len(tokens) < limit:
        verified = model.step(root_only(tokens[-1]))
        model.commit([0])
        tokens.append(int(verified.chosen[0]))
        drafts.append(verified.stream_logits)
    return Recording(list(prompt), tokens, np.stack(drafts).astype(np.float16))


class RecordedModel:
    """A step model that replays a recording; `calls` and `seconds` by the table of costs.

    Behind the recording's end it repeats the last token and draft: the caller's limit ends the text.
    """

    def __init__(self, recording: Recording, costs: StepCosts, num_nodes: int) -> None:
        vocab = recording.stream_logits.shape[1]
        context = len(recording.prompt) + len(recording.tokens) + num_nodes + 1
        self.limits = StepLimits(num_nodes, num_nodes, vocab, context, defers_streams=True)
        self._recording, self._costs, self._table = recording, costs, costs.up_to(num_nodes)
        self._position = self._next = 0
        self.calls, self.seconds = 0, 0.0

    def prefill(self, tokens, choose=None, defer=False) -> Proposal:
        del tokens, choose, defer
        return Proposal(self._recording.tokens[0], self._drafts(0))

    def step(self, tree: DraftTree, choose=None, defer=False) -> Verified:
        chosen, node, position = np.full(tree.num_nodes, -1), 0, self._position
        tokens = self._recording.tokens
        while True:
            chosen[node] = tokens[min(position + 1, len(tokens) - 1)]
            following = [c for c in tree.children(node) if tree.tokens[c] == chosen[node]]
            position += 1
            if not following:
                break
            node = following[0]
        self._next = position
        self.calls += 1
        plain = tree.num_nodes == 1 and not defer
        self.seconds += self._table[tree.num_nodes - 1] + (0.0 if defer or plain else self._costs.streams)
        return Verified(np.arange(tree.num_nodes), chosen, node, self._drafts(position))

    def commit(self, path) -> None:
        self._position = self._next

    def streams(self) -> np.ndarray:
        self.seconds += self._costs.streams
        return self._drafts(self._position)

    def _drafts(self, position: int) -> np.ndarray:
        drafts = self._recording.stream_logits
        return drafts[min(position, len(drafts) - 1)].astype(np.float32)


def replay_recordings(
    drafter, recordings: Sequence[Recording], costs: StepCosts, stop_ids: frozenset[int]
) -> tuple[float, float, float]:
    """Tokens per call, model seconds per call by the table, host seconds of drafting per call."""
    tokens = calls = 0
    model_seconds = host = 0.0
    for recording in recordings:
        model = RecordedModel(recording, costs, max(drafter.num_nodes, 1))
        steps = decode(model, drafter, recording.prompt, len(recording.tokens), stop_ids)
        start = time.thread_time()  # of this thread alone, whatever else the machine does
        tokens += sum(len(step.tokens) for step in steps) - 1
        host += time.thread_time() - start
        calls, model_seconds = calls + model.calls, model_seconds + model.seconds
    return tokens / max(calls, 1), model_seconds / max(calls, 1), host / max(calls, 1)


def learn(
    num_nodes: int, costs: StepCosts, bigram_bias, recordings: Sequence[Recording], stop_ids
) -> Experience:
    """Experience from the recordings: decoded without streams, always with them, then where they pay."""
    rate = 1.0 / costs.seconds[0]
    blank = Experience(rate, ((2.0, costs.up_to(num_nodes)[min(7, num_nodes - 1)]),) * NUM_CELLS)
    found = {}
    for streams in ("never", "always"):
        drafter = AdaptiveDrafter(num_nodes, costs, blank, bigram_bias, streams=streams)
        replay_recordings(drafter, recordings, costs, stop_ids)
        found[streams] = drafter.experience()
    never, always = found["never"], found["always"]
    start = replace(always, rate=max(never.rate, always.rate), lookup=never.lookup)
    drafter = AdaptiveDrafter(num_nodes, costs, start, bigram_bias)
    replay_recordings(drafter, recordings, costs, stop_ids)
    return drafter.experience()


def tune(
    model: MLXStepModel,
    bigram_bias,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    rounds: int = 9,
    report: Callable[[str], None] = lambda text: None,
    prunes: bool = False,
) -> tuple[DraftChoice | AdaptiveChoice, dict]:
    """The candidate with the most predicted tokens per second, and the evidence: `costs` (seconds by
    nodes, pruned ones too), `candidates`, and where tokens per call are from (`source`).

    The adaptive draft learns from the first half of the prompts and is judged by the second half; what is
    written is what it learned from all of them. prunes: the adapter has a pruning head, so K is a question.
    """
    costs, table = _costs(model, int(np.median([len(p) for p in prompts])), rounds, prunes)
    num_nodes, recordings = model.limits.num_nodes, []
    for prompt in prompts:
        recordings.append(record(model, prompt, max_tokens, stop_ids))
        report("recording")
    half = (len(recordings) + 1) // 2
    learned, judged = recordings[:half], recordings[half:] or recordings
    known = learn(num_nodes, costs, bigram_bias, learned, stop_ids)
    wanted = [*candidates(num_nodes, model.limits.num_streams), AdaptiveChoice(num_nodes, costs, known)]
    evidence = _replayed(wanted, bigram_bias, judged, costs, stop_ids, report)

    def decoded(choice: DraftChoice) -> float:
        asked = [recording.prompt for recording in judged]
        drafter = choice.drafter(bigram_bias)
        return decoded_tokens_per_call(model, choice.num_kept, drafter, asked, max_tokens, stop_ids)

    more, why = pruned_candidates(dict(zip(wanted[:-1], evidence, strict=False)), table, evidence, decoded)
    choice = _best([*wanted, *more], [*evidence, *why])
    if isinstance(choice, AdaptiveChoice):
        choice = replace(choice, experience=learn(num_nodes, costs, bigram_bias, recordings, stop_ids))
    source = f"replay of {len(judged)} of {len(recordings)} prompts' own answers"
    return choice, {"source": source, "costs": table, "candidates": [*evidence, *why]}


def _replayed(wanted, bigram_bias, recordings, costs: StepCosts, stop_ids, report) -> list[dict]:
    """Evidence of every choice from the recordings."""
    evidence = []
    for choice in wanted:
        found = replay_recordings(choice.drafter(bigram_bias), recordings, costs, stop_ids)
        evidence.append(_evidence(choice.label(), *found))
        report(choice.label())
    return evidence


def tune_by_ranks(
    model: MLXStepModel, bigram_bias, statistics: dict, rounds: int = 9, prunes: bool = False
) -> tuple[DraftChoice, dict]:
    """As `tune`, without prompts: tokens per call predicted from the adapter's rank statistics."""
    shares = path_shares(statistics)
    context = min(BLANK_CONTEXT, model.limits.context // 2)
    costs, table = _costs(model, context, rounds, prunes)
    num_nodes, evidence = model.limits.num_nodes, []
    proposal = model.prefill([1] * context)
    wanted = rank_candidates(num_nodes, model.limits.num_streams)
    for choice in wanted:
        drafter, start = choice.drafter(bigram_bias), time.thread_time()
        for _ in range(rounds):
            drafter.grow(proposal, frozenset(), model.limits.num_streams)
        host = (time.thread_time() - start) / rounds
        seconds = float(costs.up_to(num_nodes)[choice.num_nodes - 1])
        seconds += costs.streams if choice.num_nodes > 1 else 0.0
        tokens = predicted_tokens_per_call(shares, choice)
        evidence.append(_evidence(choice.label(), tokens, seconds, host))
    found = {"source": "recorded rank statistics", "costs": table, "candidates": evidence}
    return _best(wanted, evidence), found


def rank_candidates(num_nodes: int, num_streams: int) -> list[DraftChoice]:
    """Drafts without prompt lookup, the papers' k-ary tree among them."""
    found = [choice for choice in candidates(num_nodes, num_streams) if not choice.lookup]
    return found + [DraftChoice(size, "k-ary") for size in tree_sizes(num_nodes)[1:]]


def _costs(model: MLXStepModel, context: int, rounds: int, prunes: bool) -> tuple[StepCosts, dict]:
    """The table of costs, and as it is written. All nodes are kept, whatever the bundle's package keeps."""
    model.keep(model.limits.num_nodes)
    costs = measure_costs(model, model.limits.num_nodes, context, rounds)
    table = {
        "sizes": list(costs.sizes),
        "seconds": [round(s, 6) for s in costs.seconds],
        "streams": round(costs.streams, 6),
        "context": context,
        "pruned": measure_pruned(model, context, rounds) if prunes and model.limits.num_nodes > 1 else [],
    }
    return costs, table


def pruned_candidates(
    judged: dict[DraftChoice, dict],
    table: dict,
    evidence: list[dict],
    decoded: Callable[[DraftChoice], float],
) -> tuple[list[DraftChoice], list[dict]]:
    """Best-first trees of all nodes with K kept, and the evidence for each.

    judged: evidence of the same trees unpruned. One that would not be the best even if it accepted what the
    unpruned tree does is written with that bound (`bound`); for others `decoded` says what it accepts.
    """
    best, choices, found = max(e["tokens_per_second"] for e in evidence), [], []
    for pruned in table["pruned"]:
        for lookup in (False, True):
            unpruned = DraftChoice(pruned["nodes"], "best-first", lookup)
            choice, known = replace(unpruned, num_kept=pruned["kept"]), judged[unpruned]
            saved = pruned["unpruned_step_seconds"] - pruned["step_seconds"]
            seconds = max(known["step_seconds"] - saved, pruned["step_seconds"]), known["draft_seconds"]
            entry = _evidence(choice.label(), known["tokens_per_call"], *seconds)
            bound = bool(entry["tokens_per_second"] <= best)
            if not bound:
                entry = _evidence(choice.label(), decoded(choice), *seconds)
            choices.append(choice)
            found.append({**entry, "bound": bound})
    return choices, found


def _best(choices: Sequence, evidence: Sequence[dict]):
    """The choice with the most tokens per second, the first of equal ones."""
    return choices[int(np.argmax([found["tokens_per_second"] for found in evidence]))]


def _evidence(label: str, tokens_per_call: float, model_seconds: float, host_seconds: float) -> dict:
    return {
        "draft": label,
        "tokens_per_call": round(tokens_per_call, 4),
        "step_seconds": round(model_seconds, 6),
        "draft_seconds": round(host_seconds, 6),
        "tokens_per_second": round(tokens_per_call / (model_seconds + host_seconds), 3),
    }
