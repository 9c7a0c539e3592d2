"""JSON without NaN and infinities."""

import json

from ss_device.json_numbers import with_nulls


def test_what_is_no_number_is_null():
    nan, inf = float("nan"), float("inf")
    value = {"a": nan, "b": [1, -inf, {"c": (inf, 2.5, True, None, "NaN")}]}
    cleaned = with_nulls(value)
    assert cleaned == {"a": None, "b": [1, None, {"c": [None, 2.5, True, None, "NaN"]}]}
    assert json.loads(json.dumps(cleaned, allow_nan=False)) == cleaned
