"""The target distribution against hand-written cases, and the keyed noise against its definition."""

import numpy as np
import pytest

from ss_device.errors import UserError
from ss_device.sampling import Sampling, draw, keyed_uniform

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def test_splitmix_known_values():
    # The first outputs of Vigna's splitmix64 from state 0: 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4.
    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    assert keyed_uniform(first, 0) == (first >> 11) * 2.0**-53  # seed xor splitmix64(0) = 0
    assert keyed_uniform(first ^ 0x9E3779B97F4A7C15, 0) == (second >> 11) * 2.0**-53


def test_uniforms_are_uniform_and_differ():
    values = np.array([keyed_uniform(7, position) for position in range(20_000)])
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p 0.001
    assert len(np.unique(values)) == len(values)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, np.array([0.01, 0.16, 0.04, 0.09]) / 0.3),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_probabilities(settings, expected):
    np.testing.assert_allclose(Sampling(**settings).probabilities(LOGITS), expected, atol=1e-7)


def test_draw_follows_token_order():
    probs = np.array([0.25, 0.0, 0.5, 0.25])
    assert [draw(probs, u) for u in (0.0, 0.249, 0.25, 0.749, 0.75, 0.999999)] == [0, 0, 2, 2, 3, 3]
    assert draw(np.array([0.5, 0.5, 0.0]), 1.0) == 1


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}, {"seed": -1}]
)
def test_settings_out_of_range(settings):
    with pytest.raises(UserError, match="must"):
        Sampling(**settings)
