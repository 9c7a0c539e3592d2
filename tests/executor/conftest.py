"""Checks on every operation that a test runs."""

import dataclasses

import numpy as np
import pytest

from ss_executor import registry


def _honest(definition):
    """The same operation, failing when a result aliases an input although `view` is not set."""

    def function(call, *arguments, **parameters):
        results = definition.function(call, *arguments, **parameters)
        listed = results if isinstance(results, tuple | list) else [results]
        given = [item for value in parameters.values() for item in (
            value if isinstance(value, list) else [value])]  # fmt: skip
        for result in listed:
            for value in given:
                if isinstance(value, np.ndarray) and isinstance(result, np.ndarray):
                    reused = call.in_place and result is value
                    assert reused or not np.shares_memory(result, value), definition.name
        return results

    return dataclasses.replace(definition, function=function)


@pytest.fixture(autouse=True)
def honest_views(monkeypatch):
    """The reuse of memory relies on operations saying which of their results are views."""
    for name, definition in registry.REGISTRY.items():
        if not (definition.view or definition.control):
            monkeypatch.setitem(registry.REGISTRY, name, _honest(definition))
