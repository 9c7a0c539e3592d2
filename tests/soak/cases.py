"""One case: a few prompts on every adapter in turn, with drafts and without, over shared prompt caches."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_runtime.mlx.loading import load_model
from tests.soak.models import (
    Setting,
    choose_pruning,
    draw_sampler,
    make_drafter,
    make_prompts,
    open_bank,
)
from tests.soak.texts import Counts, Mismatch, Question, explain, first_difference, text_of

TURNS, TOKENS, LONGEST = 32, 64, 30


def run_case(setting: Setting, counts: Counts, report: Callable[[Mismatch], None]) -> None:
    """Compare; what differs is reported and counted."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        bundle, bank = open_bank(setting, Path(name))
        plain_models: dict = {}
        rng = setting.rng("turns")
        longest = min(LONGEST, bundle.manifest.architecture.default_context // 2)
        for turn, prompt in enumerate(make_prompts(rng, TURNS, longest)):
            app = rng.choice(bank.names)
            if app not in plain_models:
                plain_models[app] = _plain_model(bundle, app, bank)
            _compare(setting, turn, bank.activate(app), plain_models[app], prompt, counts, report)
            if rng.random() < 0.1:  # a switch that frees and loads
                bank.unload(app)
                bank.load(app)
    counts.cases += 1
    del bank, plain_models
    gc.collect()
    mx.clear_cache()


def _plain_model(bundle, app: str, bank):
    """A model of its own, without a prompt cache."""
    return load_model(bundle, bundle.adapter(app), bank.settings)


def _compare(setting: Setting, turn: int, resident, plain_model, prompt, counts, report) -> None:
    """One prompt with drafts and without."""
    rng = setting.rng(f"turn {turn}")
    config = resident.adapter.config
    drafter = make_drafter(rng, config, resident.bigram_bias)
    sampler, count = draw_sampler(rng), rng.randint(1, TOKENS)
    try:
        resident.model.keep(choose_pruning(rng, config))
        found = text_of(resident.model, drafter, prompt, count, sampler, counts)
        counts.reused += resident.model.reused
        expected = text_of(plain_model, Drafter(1), prompt, count, sampler)
    except UserError as error:
        counts.refused += 1
        counts.reasons[re.sub(r"\d+", "N", str(error))] += 1
        return
    counts.texts += 1
    counts.tokens += len(found)
    if first_difference(expected, found) is None:
        return
    label = f"turn {turn}, {resident.adapter.app}, {drafter.num_nodes} {drafter.shape}; {setting.label()}"
    kv_bits = plain_model.cache.bits
    question = Question(setting.id, label, setting.dtype, kv_bits, drafter, prompt, count, sampler)
    mismatch = explain(question, plain_model, resident.model, (expected, found))
    counts.mismatches.append(mismatch)
    report(mismatch)
