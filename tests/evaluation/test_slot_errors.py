"""Slot errors of E2E-style texts: told, missing and wrong values, negation, names, other forms."""

from __future__ import annotations

import pytest

from ss_device.evaluation.slot_errors import SlotErrors, count_slot_errors, slot_errors

MR = (
    "name[The Copper Kettle], eatType[coffee shop], food[Italian], priceRange[£20-25], "
    "customer rating[3 out of 5], area[riverside], familyFriendly[no], near[Café Indian Star]"
)
TEXT = (
    "Copper Kettle is a coffee shop by the river near Cafe Indian Star. It serves pasta for £20 to £25, "
    "was given three stars and isn't kid-friendly."
)


def test_every_slot_told():
    assert slot_errors(MR, TEXT) == SlotErrors(slots=8, missing=0, wrong=0)


@pytest.mark.parametrize(
    ("told", "instead"),
    [
        ("coffee shop", "pub"),
        ("pasta", "Chinese food"),
        ("£20 to £25", "under £20"),
        ("£20 to £25", "more than thirty pounds"),
        ("three stars", "a customer rating of 5"),
        ("three stars", "a low customer rating"),
        ("by the river", "in the city center"),
        ("isn't kid-friendly", "is kid-friendly"),
    ],
)
def test_another_value_is_wrong(told, instead):
    assert slot_errors(MR, TEXT.replace(told, instead)) == SlotErrors(8, missing=0, wrong=1)


@pytest.mark.parametrize(
    "told",
    [
        "Copper Kettle",
        "coffee shop",
        "pasta",
        "for £20 to £25",
        "three stars",
        "by the river",
        "isn't kid-friendly",
    ],
)
def test_a_value_left_out_is_missing(told):
    assert slot_errors(MR, TEXT.replace(told, "here")) == SlotErrors(8, missing=1, wrong=0)


def test_names_tell_no_other_slot():
    """The near place's name holds "Café" and "Indian": neither the eatType nor the food is told."""
    errors = slot_errors(
        "name[Zum], eatType[coffee shop], food[Indian], near[Café Indian Star]",
        "Zum is near Café Indian Star.",
    )
    assert errors == SlotErrors(4, missing=2, wrong=0)


@pytest.mark.parametrize(
    "text",
    [
        "not family-friendly",
        "a pub, and no kids are allowed",
        "for adults only",
        "children are not welcome",
        "doesn't cater to families with small children",
        "non-child friendly",
        "Kids are prohibited",
    ],
)
def test_no_families(text):
    assert slot_errors("name[Zum], familyFriendly[no]", f"Zum: {text}.") == SlotErrors(2, 0, 0)
    assert slot_errors("name[Zum], familyFriendly[yes]", f"Zum: {text}.") == SlotErrors(2, 0, wrong=1)


@pytest.mark.parametrize(
    "text",
    [
        "is family friendly",
        "is not cheap, but children are welcome",
        "is good for adults and kids",
        "is a kid friendly pub not far from here",
    ],
)
def test_families(text):
    assert slot_errors("name[Zum], familyFriendly[yes]", f"Zum {text}.") == SlotErrors(2, 0, 0)
    assert slot_errors("name[Zum], familyFriendly[no]", f"Zum {text}.") == SlotErrors(2, 0, wrong=1)


def test_words_for_figures_but_no_figures_for_words():
    cheap, figure = "Zum is cheap and highly rated.", "Zum is under £20 and has 5 out of 5 stars."
    by_figure = "name[Zum], priceRange[less than £20], customer rating[5 out of 5]"
    by_word = "name[Zum], priceRange[cheap], customer rating[high]"
    assert slot_errors(by_figure, cheap) == slot_errors(by_figure, figure) == SlotErrors(3, 0, 0)
    assert slot_errors(by_word, cheap) == SlotErrors(3, 0, 0)
    assert slot_errors(by_word, figure) == SlotErrors(3, 0, wrong=2)


def test_price_and_rating_share_words():
    text = "Zum has a high price range and a low customer rating."
    assert slot_errors("name[Zum], priceRange[high], customer rating[low]", text) == SlotErrors(3, 0, 0)
    assert slot_errors("name[Zum], priceRange[cheap], customer rating[high]", text) == SlotErrors(
        3, 0, wrong=2
    )


@pytest.mark.parametrize(
    "mr",
    [
        "",
        "inform(name[Zum], food[Italian])",
        "name[Zum], food[Klingon]",
        "name[Zum], stars[3]",
        "Hotel-Inform(Area[west])",
        "food[Italian]",
    ],
)
def test_other_forms_are_left_out(mr):
    assert slot_errors(mr, "Zum serves Italian food.") is None
    assert count_slot_errors([(mr, "Zum.")]) == {
        "texts": 0,
        "slots": 0,
        "missing": 0,
        "wrong": 0,
        "slot_error_rate": 0.0,
    }


def test_counts_over_texts():
    pairs = [(MR, TEXT), ("name[Zum], area[riverside]", "Zum is downtown."), ("?compare(x[y])", "x")]
    pairs.append(("name[Zum], food[French]", "A place."))
    assert count_slot_errors(pairs) == {
        "texts": 3,
        "slots": 12,
        "missing": 2,
        "wrong": 1,
        "slot_error_rate": 0.25,
    }
