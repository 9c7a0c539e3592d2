"""Changes of JSON texts that keep them near to what a reader expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from tests.fuzz.hostile_values import hostile_value, nearby_number

# Stands in the changed value for text that `json.dumps` would not write.
RAW = "@raw text@"
Place = tuple[list | dict, object]


def mutate_json(text: bytes, rng: Random) -> tuple[bytes, str]:
    """A changed JSON text and what was done to it. What is no JSON stays as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text, "nothing: not JSON"
    kind = rng.choices(list(_KINDS), weights=[w for _, w in _KINDS.values()])[0]
    return _KINDS[kind][0](value, rng)


def _replaced(value: object, rng: Random) -> tuple[bytes, str]:
    places = list(places_of(value))
    if not places:
        return _whole(value, rng)
    holder, key = _biased(places, rng)
    name, raw = hostile_value(rng)
    where = _named(value, holder, key)
    holder[key] = RAW
    return _text(value, raw), f"{where} = {name}"


def _nudged(value: object, rng: Random) -> tuple[bytes, str]:
    places = [(h, k) for h, k in places_of(value) if type(h[k]) in (int, float)]
    if not places:
        return _replaced(value, rng)
    holder, key = _biased(places, rng)
    name, raw = nearby_number(holder[key], rng)
    where = _named(value, holder, key)
    holder[key] = RAW
    return _text(value, raw), f"{where}: {name}"


def _removed(value: object, rng: Random) -> tuple[bytes, str]:
    places = list(places_of(value))
    if not places:
        return _whole(value, rng)
    holder, key = _biased(places, rng)
    where = _named(value, holder, key)
    del holder[key]
    return json.dumps(value).encode(), f"{where} removed"


def _added(value: object, rng: Random) -> tuple[bytes, str]:
    """A further key with a hostile name or value, or the same key a second time."""
    holders = [h for h in _holders(value) if isinstance(h, dict)]
    if not holders:
        return _replaced(value, rng)
    holder = rng.choice(holders)
    name, raw = hostile_value(rng)
    if holder and rng.random() < 0.3:
        key, what = rng.choice(list(holder)), "again"
        holder[RAW] = RAW
        text = json.dumps(value).replace(json.dumps(RAW), json.dumps(key), 1)
        return text.replace(json.dumps(RAW), raw).encode("utf-8", "surrogatepass"), f"{key} {what} = {name}"
    key = raw if raw.startswith('"') and rng.random() < 0.5 else '"another"'
    holder[RAW] = 1
    copied = rng.choice(list(holder.values()))
    text = json.dumps(value).replace(json.dumps(RAW) + ": 1", f"{key}: {json.dumps(copied)}", 1)
    return text.encode("utf-8", "surrogatepass"), f"key {key[:40]} added"


def _renamed(value: object, rng: Random) -> tuple[bytes, str]:
    places = [(h, k) for h, k in places_of(value) if isinstance(h, dict)]
    if not places:
        return _replaced(value, rng)
    holder, key = rng.choice(places)
    name, raw = hostile_value(rng)
    if not raw.startswith('"'):
        raw = json.dumps(str(key) + "x")
    held = holder.pop(key)
    holder[RAW] = held
    text = json.dumps(value).replace(json.dumps(RAW), raw, 1)
    return text.encode("utf-8", "surrogatepass"), f"key {key} named {name}"


def _swapped(value: object, rng: Random) -> tuple[bytes, str]:
    places = list(places_of(value))
    if len(places) < 2:
        return _whole(value, rng)
    (one, a), (two, b) = rng.sample(places, 2)
    where = f"{_named(value, one, a)} and {_named(value, two, b)} swapped"
    first, second = one[a], two[b]
    one[a], two[b] = json.loads(json.dumps(second)), json.loads(json.dumps(first))
    return json.dumps(value).encode(), where


def _whole(value: object, rng: Random) -> tuple[bytes, str]:
    name, raw = hostile_value(rng)
    return raw.encode("utf-8", "surrogatepass"), f"the whole file = {name}"


def places_of(value: object) -> Iterator[Place]:
    for holder in _holders(value):
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            yield holder, key


def _holders(value: object) -> Iterator[list | dict]:
    if isinstance(value, list | dict):
        yield value
        for held in value.values() if isinstance(value, dict) else value:
            yield from _holders(held)


def _biased(places: list[Place], rng: Random) -> Place:
    """One of the places; every other time one of a dictionary, of which long lists have few."""
    named = [place for place in places if isinstance(place[0], dict)]
    return rng.choice(named if named and rng.random() < 0.8 else places)


def _named(value: object, holder: list | dict, key: object) -> str:
    """Where in the value a place is, as `a.b[2]`."""
    if value is holder:
        return str(key)
    for name in value if isinstance(value, dict) else range(len(value)):
        if isinstance(value[name], list | dict) and any(h is holder for h in _holders(value[name])):
            return f"{name}.{_named(value[name], holder, key)}"
    return str(key)


def _text(value: object, raw: str) -> bytes:
    return json.dumps(value).replace(json.dumps(RAW), raw, 1).encode("utf-8", "surrogatepass")


_KINDS = {
    "replaced": (_replaced, 10),
    "nudged": (_nudged, 4),
    "removed": (_removed, 3),
    "added": (_added, 2),
    "renamed": (_renamed, 1),
    "swapped": (_swapped, 2),
    "whole": (_whole, 1),
}
