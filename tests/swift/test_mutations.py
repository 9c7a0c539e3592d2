"""scripts/swift_mutations.py quotes lines of the Swift sources: each stands there, once."""

from __future__ import annotations

import pytest

from scripts.swift_mutations import MUTATIONS, PACKAGE


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_quoted_line_stands_in_its_file_once(mutation):
    assert (PACKAGE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
