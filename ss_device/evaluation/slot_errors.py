"""Slot errors of texts about restaurants in the form of the E2E data set, by patterns of the values.

As the slot matching of Dušek et al. (2019) and the aligner of Juraska et al. (2018): a value counts as told
when one of its wordings is in the text. A word may stand for a figure ("cheap" for less than £20, "highly
rated" for 5 out of 5). A figure may not stand for a word: the meaning representation does not give it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

_MR = re.compile(r"[A-Za-z ]+\[[^\[\]]+\](?:, ?[A-Za-z ]+\[[^\[\]]+\])*")
_SLOT = re.compile(r"([A-Za-z ]+)\[([^\[\]]+)\]")
_NAMES = ("name", "near")

# Up to so many words within a part of a sentence.
_WORDS = r"(?: (?!and\b|but\b|however\b)\w+){0,4}?"
_RATING = r"(?:customers?|consumers?|rat\w+|review\w*|scor\w+|feedback|satisfaction)"
_COST = r"(?:pric\w+|cost\w*|budget)"
_NOT_RATING = rf"(?! (?:\w+ )?{_RATING})"
_NOT_COST = rf"(?! (?:\w+ )?{_COST})"


def _costs(words: str) -> str:
    """Pattern of a price that is one of some words: "high prices", "the price range is high"."""
    return rf"\b(?:{words})(?: \w+)? {_COST}|\b{_COST}{_WORDS} (?:{words})\b{_NOT_RATING}"


def _rated(words: str) -> str:
    """Pattern of a rating that is one of some words: "low rating", "rated low by customers"."""
    before = rf"\b(?:{words})(?! {_COST})(?: \w+)? {_RATING}"
    return rf"{before}|\b{_RATING}{_WORDS} (?:{words})\b{_NOT_COST}"


def _stars(number: str) -> str:
    """Pattern of a rating out of 5."""
    alone = rf"\b{_RATING}{_WORDS} (?<!out of )(?<!\d of )(?:{number})\b(?! (?:20|25|30))"
    return (
        rf"\b(?:{number}) (?:out )?(?:of|from) (?:a possible )?(?:5|five)\b|\b(?:{number}) stars?\b|{alone}"
    )


# A few words are said of neighbouring values ("affordable"); either value is then told.
_CHEAP = (
    r"\bcheap\w*|\binexpensive\w*|\baffordabl\w+|\bbudget\b"
    rf"|{_costs('low|lower|small|good|great|bargain|value')}"
)
_MODERATE = (
    rf"\bmoderate\w*\b{_NOT_RATING}|\breasonabl\w+|\baffordabl\w+|\bmid(?:dle)? ?(?:range|pric\w+)"
    rf"|{_costs('mid|middle|medium|average|averagely|fair|fairly|decent|moderate|moderately')}"
)
_DEAR = (
    r"\bexpensive\w*|\bpric(?:e?y|ier)\b|\bcostly\b|\bupscale\b|\bhigh end\b"
    rf"|{_costs('high|higher|highly|steep')}"
)
_POOR = rf"{_rated('low|lowly|lower|poor|poorly|bad|badly|negative|terrible')}|\bnot (?:highly|well) rated"
_MEDIOCRE = (
    rf"\baverage\w*\b{_NOT_COST}|\bmediocre\b"
    rf"|{_rated('average|averagely|moderate|moderately|medium|decent|ok|okay')}"
)
_FINE = (
    rf"{_rated('high|highly|higher|top|excellent|great|good|well|best|outstanding|superb|perfect')}"
    r"|\bhighly (?:recommended|regarded|acclaimed|praised)|\bwell (?:regarded|liked|received|reviewed)"
)
_OWN = {
    "eatType": {
        "pub": r"\bpubs?\b|\bbars?\b|\btavern\b|\binn\b",
        "coffee shop": r"\bcoffee|\bcafes?\b",
        "restaurant": r"\brestaura\w+|\bdiner\b|\beatery\b|\bbistro\b|\bdining\b",
    },
    "food": {
        "italian": r"\bitalian?\b|\bitaly\b|\bpasta\b|\bpizzas?\b",
        "french": r"\bfrench\b|\bfrance\b",
        "english": r"\benglish\b|\bbritish\b(?! pounds?)|\bfish and chips\b",
        "japanese": r"\bjapan\w*\b|\bsushi\b",
        "chinese": r"\bchinese\b",
        "indian": r"\bindian?\b|\bcurr(?:y|ies)\b",
        "fast food": r"\bfast ?foods?\b|\bburgers?\b|\bfries\b",
    },
    "area": {
        "riverside": r"\briver|\bwaterfront\b|\bwaterside\b|\bbanks?\b|\bthe water\b",
        "city centre": r"\bcent(?:re|er|ral)\w*|\bdowntown\b|\bcity\b|\b(?:heart|middle) of (?:the )?town",
    },
    "priceRange": {
        "less than £20": r"\b(?:20|twenty)\b(?!.{0,12}\b(?:25|five)\b)",
        "£20-25": r"\b(?:20|twenty)\b.{0,12}\b(?:25|five)\b",
        "more than £30": r"\b(?:30|thirty)\b",
        "cheap": _CHEAP,
        "moderate": _MODERATE,
        "high": _DEAR,
    },
    "customer rating": {
        "1 out of 5": _stars("1|one"),
        "3 out of 5": _stars("3|three"),
        "5 out of 5": _stars("5|five"),
        "low": _POOR,
        "average": _MEDIOCRE,
        "high": _FINE,
    },
}
_PATTERNS = {
    slot: {value: re.compile(p) for value, p in patterns.items()} for slot, patterns in _OWN.items()
}
_WORD_FOR = {
    "priceRange": {"less than £20": "cheap", "£20-25": "moderate", "more than £30": "high"},
    "customer rating": {"1 out of 5": "low", "3 out of 5": "average", "5 out of 5": "high"},
}

_KIDS = (
    r"(?:famil(?:y|ies)|kids?|kiddies|child(?:ren)?s?|youngsters|young ones|little ones|toddlers|babies)"
)
_NEGATIONS = (
    r"(?:not(?! only| just)|no|non|never|nor|without|lacks?|unsuitable|inappropriate|bad|poor|leave|un)"
)
_UNFRIENDLY = re.compile(
    rf"\b{_NEGATIONS}{_WORDS} {_KIDS}\b(?: friendly| (?:of|with)(?: \w+)? {_KIDS}\b)?"
    rf"|\b{_KIDS}(?: friendly)?(?: (?!and\b|but\b)\w+){{0,3}}? (?:not|no)\b(?! (?:far|only|just|longer))"
    rf"|\b{_KIDS}{_WORDS} (?:prohibited|banned|forbidden|unfriendly|unwelcome|discouraged|free)\b"
    r"|(?<!kids and )(?<!children and )(?<!families and )\b(?:adults?|grown ups?)\b"
    rf"(?! (?:and|or) (?:the )?{_KIDS})(?! alike)"
    r"|\bunfriendly\b|\bover 18s?\b|\bnot (?:\w+ )?friendly\b"
)
_FRIENDLY = re.compile(rf"\b{_KIDS}\b|\ball ages\b|\bfriendly\b")


@dataclass(frozen=True)
class SlotErrors:
    """Slots of one meaning representation, and how many of them its text omits or tells wrongly."""

    slots: int
    missing: int
    wrong: int


def slot_errors(mr: str, text: str) -> SlotErrors | None:
    """The slots of an E2E meaning representation that a text omits or gives another value.

    mr: `name[...], priceRange[...], ...`. A slot is wrong when only another value of it is found, and
    missing when none is. `name` and `near` are never wrong: their values are open. Letter case, accents
    and hyphens do not matter. None for a representation of any other form, slot or value.
    """
    slots = _slots(mr)
    if slots is None:
        return None
    evened = _evened(text)
    # Names go first: "Raja Indian Cuisine" says nothing about the food.
    rest = evened
    for slot in _NAMES:
        if slot in slots:
            rest = re.sub(_name(slots[slot]), " , ", rest)
    missing = wrong = 0
    for slot, value in slots.items():
        if slot in _NAMES:
            told = value if re.search(_name(value), evened) else None
        else:
            told = _told(slot, value, rest)
        missing += told is None
        wrong += told not in (None, value)
    return SlotErrors(len(slots), missing, wrong)


def count_slot_errors(pairs: Iterable[tuple[str, str]]) -> dict:
    """The slot errors of (mr, text) pairs together; pairs with an MR of another form are left out.

    Returns texts, slots, missing and wrong as counts, and slot_error_rate: (missing + wrong) / slots,
    in [0, 1]; 0.0 without any slot.
    """
    found = [errors for mr, text in pairs if (errors := slot_errors(mr, text)) is not None]
    slots, missing, wrong = (sum(getattr(e, part) for e in found) for part in ("slots", "missing", "wrong"))
    rate = round((missing + wrong) / slots, 4) if slots else 0.0
    return {
        "texts": len(found),
        "slots": slots,
        "missing": missing,
        "wrong": wrong,
        "slot_error_rate": rate,
    }


def _slots(mr: str) -> dict[str, str] | None:
    """Slot → value, with the values of `_PATTERNS` in lower case; None for another form."""
    if not _MR.fullmatch(mr.strip()):
        return None
    slots: dict[str, str] = {}
    for slot, value in _SLOT.findall(mr):
        slot = slot.strip()
        if slot not in _NAMES:
            value = value.lower()
            if value not in (("yes", "no") if slot == "familyFriendly" else _PATTERNS.get(slot, ())):
                return None
        slots[slot] = value
    return slots if "name" in slots else None


def _evened(text: str) -> str:
    """Lower-case words without accents and hyphens, "n't" as "not"; full stops and commas stay."""
    text = unicodedata.normalize("NFKD", text.lower().replace("’", "'"))
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"n't\b", " not", text).replace("can not", "not").replace("/", " out of ")
    text = re.sub(r"\b(is|are|does|do|was)nt\b", r"\1 not", text)
    text = re.sub(r"'s?\b", "", text)
    return " ".join(re.sub(r"([^\w\s])", lambda m: " , " if m[0] in ".,;:!?()" else " ", text).split())


def _name(value: str) -> str:
    """Pattern of a name; its article may be left out."""
    words = _evened(value).split()
    if words[:1] == ["the"] and len(words) > 1:
        return r"\b(?:the )?" + " ".join(map(re.escape, words[1:])) + r"\b"
    return r"\b" + " ".join(map(re.escape, words)) + r"\b"


def _told(slot: str, value: str, text: str) -> str | None:
    """The value itself where the text tells it, else another one that it tells, else None."""
    if slot == "familyFriendly":
        unfriendly = _UNFRIENDLY.search(text) is not None
        friendly = _FRIENDLY.search(_UNFRIENDLY.sub(" , ", text)) is not None
        told = {"yes": friendly, "no": unfriendly}
        return value if told[value] else next((v for v, found in told.items() if found), None)
    patterns = _PATTERNS[slot]
    own = [value, *([_WORD_FOR[slot][value]] if value in _WORD_FOR.get(slot, ()) else [])]
    if any(patterns[v].search(text) for v in own):
        return value
    return next((v for v, pattern in patterns.items() if v not in own and pattern.search(text)), None)
