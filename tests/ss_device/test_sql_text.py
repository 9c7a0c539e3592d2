"""SQL as text: literals as the question writes them, permuted columns, forms to compare."""

from __future__ import annotations

import pytest

from ss_device.sql_text import evened, literals_as_asked, with_permuted_columns, without_literals


@pytest.mark.parametrize(
    ("given", "question", "wanted"),
    [
        ('"league two"', "if it is League Two?", '"League Two"'),
        ('"League Two"', "if it is league two?", '"league two"'),
        ('"x"', "if it is x or X?", '"x"'),
        ('"gone"', "nothing of it", '"gone"'),
        ("'leeds' AND c = \"rovers\"", "Leeds ROVERS", "'Leeds' AND c = \"ROVERS\""),
        ('""', "Empty", '""'),
        # The lower case of some letters has another length: then nothing is changed.
        ('"x"', "İ X", '"x"'),
    ],
)
def test_literals_take_the_questions_letter_case(given, question, wanted):
    start = "SELECT a FROM t WHERE b = "
    assert literals_as_asked(start + given, question) == start + wanted


def test_columns_and_tables_in_another_order():
    context = "CREATE TABLE a (x INTEGER, y VARCHAR); CREATE TABLE b (z TIME)"
    reverse = with_permuted_columns(context, lambda n: list(range(n))[::-1])
    assert reverse == "CREATE TABLE b (z TIME); CREATE TABLE a (y VARCHAR, x INTEGER)"
    assert with_permuted_columns(context, lambda n: list(range(n))) == context
    for other in ("CREATE TABLE a (x NUMERIC(3, 2))", "a, b and c", ""):
        assert with_permuted_columns(other, lambda n: list(range(n))[::-1]) == other


def test_forms_to_compare():
    assert evened("SELECT  A\nFROM t ") == "select a from t"
    one = without_literals("SELECT c_2 FROM table_2_17 WHERE a = \"O'Day\" AND b > -3.5 AND c = 'x'")
    assert one == "select c_2 from table_2_17 where a = ? and b > ? and c = ?"
    assert without_literals('SELECT a WHERE b = "2"') == without_literals("SELECT a WHERE b = 17")
    assert without_literals("SELECT a FROM t") != without_literals("SELECT b FROM t")
