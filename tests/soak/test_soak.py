"""The soak in small: sound models show no difference, a broken one is noticed, growth is noticed."""

from __future__ import annotations

import pytest

from ss_runtime.mlx.cached_text import CachedText
from tests.soak import cases
from tests.soak.memory import MemoryTrace
from tests.soak.models import make_setting
from tests.soak.server import soak_server
from tests.soak.texts import Counts, edge_distance, first_difference


@pytest.mark.heavy
def test_sound_models_differ_in_nothing_that_rounding_does_not_explain():
    counts = Counts()
    for index in (0, 3):
        cases.run_case(make_setting(2, index), counts, lambda mismatch: None)
    assert counts.texts > 10 and counts.tokens > 50 and counts.drafted and counts.reused
    assert not counts.unexplained, [m.line() for m in counts.unexplained]


def test_a_cache_that_reuses_too_much_is_noticed(monkeypatch):
    """Prompts begin with tokens of another text: keys and values are not theirs."""
    monkeypatch.setattr(CachedText, "common", lambda self, tokens: min(self.reusable, len(tokens) - 1))
    counts, told = Counts(), []
    cases.run_case(make_setting(2, 2), counts, told.append)
    assert counts.unexplained and told
    assert "NOT EXPLAINED" in counts.unexplained[0].line() and "2:2" in counts.unexplained[0].line()


@pytest.mark.heavy
def test_a_server_under_load_has_no_problems():
    """Every way of asking comes: it must be one that the server takes."""
    served = soak_server(0, 0.15)
    assert not served.problems
    assert served.counts["status 200"] and all(
        served.counts[way] for way in ("whole", "stream", "leave", "nonsense", "change")
    )


def test_settings_are_determined_by_seed_and_index():
    assert [make_setting(1, i) for i in range(20)] == [make_setting(1, i) for i in range(20)]


def test_differences_of_texts():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_distance_of_a_draw_to_the_nearest_edge():
    import numpy as np

    from ss_device.sampling import Sampling, keyed_uniform

    drawn = keyed_uniform(5, 0)
    logits = np.log(np.array([drawn + 1e-3, 1 - drawn - 1e-3]))
    assert edge_distance(Sampling(seed=5), logits, 0) == pytest.approx(1e-3)


def test_growing_memory_is_noticed():
    flat, growing = MemoryTrace(), MemoryTrace()
    flat.samples = [500 << 20] * 40
    growing.samples = [(500 + 20 * i) << 20 for i in range(40)]
    assert flat.is_flat() and not growing.is_flat()
    growing.samples = growing.samples[:4]
    assert growing.is_flat() and "too few" in growing.line()
