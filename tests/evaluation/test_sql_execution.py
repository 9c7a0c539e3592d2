"""Execution accuracy: queries of one meaning match, others do not, and no query does harm."""

from __future__ import annotations

import time

import pytest

from ss_device.evaluation import sql_execution
from ss_device.evaluation.sql_execution import execution_match

BOATS = "CREATE TABLE boats (name VARCHAR, harbour VARCHAR, crew INTEGER, built INTEGER)"
FLEET = (
    "CREATE TABLE sailor (sailor_id INTEGER, name VARCHAR, age INTEGER); "
    "CREATE TABLE trip (trip_id INTEGER, sailor_id INTEGER, port VARCHAR, day DATETIME)"
)
CREWS = 'SELECT name FROM boats WHERE harbour = "Old Quay" AND crew > 5'
TRIPS = (
    "SELECT T1.name, COUNT(*) FROM sailor AS T1 JOIN trip AS T2 ON T1.sailor_id = T2.sailor_id "
    "WHERE T2.port = 'Kiel' AND T1.age < 40 GROUP BY T1.sailor_id"
)


@pytest.mark.parametrize(
    "predicted",
    [
        CREWS,
        'SELECT name FROM boats WHERE crew > 5 AND harbour = "Old Quay"',
        "select NAME from Boats where harbour = 'OLD QUAY' and crew >= 6;",
        "SELECT b.name FROM boats AS b WHERE NOT (b.crew <= 5) AND b.harbour IN ('old quay')",
        'SELECT name FROM boats WHERE crew > 5 AND harbour = "Old Quay" ORDER BY built',
    ],
)
def test_one_meaning(predicted):
    assert execution_match(BOATS, predicted, CREWS) is True


@pytest.mark.parametrize(
    "predicted",
    [
        'SELECT harbour FROM boats WHERE harbour = "Old Quay" AND crew > 5',
        'SELECT name FROM boats WHERE harbour = "Old Quay"',
        "SELECT name FROM boats WHERE crew > 5",
        'SELECT name FROM boats WHERE harbour = "Old Quay" AND crew >= 5',
        'SELECT name FROM boats WHERE harbour = "Old Quay" AND crew < 5',
        'SELECT name FROM boats WHERE harbour = "Old Quay" AND crew > 6',
        'SELECT name FROM boats WHERE harbour = "New Quay" AND crew > 5',
        'SELECT name FROM boats WHERE name = "Old Quay" AND crew > 5',
        'SELECT name FROM boats WHERE harbour = "Old Quay" AND built > 5',
        'SELECT DISTINCT name FROM boats WHERE harbour = "Old Quay" AND crew > 5',
        'SELECT COUNT(name) FROM boats WHERE harbour = "Old Quay" AND crew > 5',
        'SELECT name, crew FROM boats WHERE harbour = "Old Quay" AND crew > 5',
        'SELECT name FROM boats WHERE harbour LIKE "%Old Quay%" AND crew > 5',
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_another_meaning(predicted, seed):
    assert execution_match(BOATS, predicted, CREWS, seed) is False


def test_aggregates_and_counted_columns():
    queries = [f"SELECT {a}(crew) FROM boats" for a in ("COUNT", "MIN", "MAX", "SUM", "AVG")]
    queries += ["SELECT COUNT(name) FROM boats", "SELECT COUNT(DISTINCT crew) FROM boats"]
    for reference in queries:
        assert [execution_match(BOATS, q, reference) for q in queries] == [q == reference for q in queries]


def test_sums_of_numbers_count_as_numbers_but_not_inside_strings():
    reference = 'SELECT name FROM boats WHERE harbour = "pier 7-6 (7-5)" AND crew < 40 + 2'
    swapped = 'SELECT name FROM boats WHERE crew < 42 AND harbour = "pier 7-6 (7-5)"'
    assert execution_match(BOATS, swapped, reference) is True
    assert execution_match(BOATS, swapped.replace("42", "43"), reference) is False


def test_joins():
    other_order = TRIPS.replace("T2.port = 'Kiel' AND T1.age < 40", 'T1.age < 40 AND T2.port = "kiel"')
    comma = TRIPS.replace(" JOIN trip AS T2 ON ", ", trip AS T2 WHERE ").replace(
        "sailor_id WHERE", "sailor_id AND"
    )
    assert execution_match(FLEET, other_order, TRIPS) is True
    assert execution_match(FLEET, comma, TRIPS) is True
    for old, new in (
        (" AND T1.age < 40", ""),
        ("T2.port = 'Kiel' AND ", ""),
        ("T1.name,", "T1.age,"),
        ("T2.sailor_id", "T2.trip_id"),
    ):
        assert execution_match(FLEET, TRIPS.replace(old, new), TRIPS) is False


def test_yes_or_no_needs_databases_without_a_result():
    reference = "SELECT COUNT(*) > 0 FROM boats WHERE harbour = 'Old Quay' AND crew = 5"
    assert execution_match(BOATS, reference.replace("*", "1"), reference) is True
    assert execution_match(BOATS, reference.replace(" AND crew = 5", ""), reference) is False
    assert execution_match(BOATS, reference.replace("harbour = 'Old Quay' AND ", ""), reference) is False


def test_order_counts_where_the_reference_orders_its_rows():
    ordered, nested = (
        "SELECT name FROM boats ORDER BY crew",
        "SELECT name FROM (SELECT * FROM boats ORDER BY crew)",
    )
    assert execution_match(BOATS, "SELECT name FROM boats ORDER BY crew DESC", ordered) is False
    assert execution_match(BOATS, "SELECT name FROM boats ORDER BY crew ASC", ordered) is True
    assert execution_match(BOATS, "SELECT name FROM boats", nested) is True


def test_numbers_in_tolerance():
    reference = "SELECT AVG(crew) FROM boats"
    assert (
        execution_match(BOATS, "SELECT SUM(crew) * 1.0 / COUNT(crew) + 0.0000001 FROM boats", reference)
        is True
    )
    assert execution_match(BOATS, "SELECT AVG(crew) + 0.001 FROM boats", reference) is False


def test_texts_decide_where_no_database_has_a_result():
    reference = "SELECT harbour FROM boats GROUP BY harbour HAVING COUNT(*) > 900"
    assert execution_match(BOATS, reference.lower(), reference) is True
    assert execution_match(BOATS, reference.replace("900", "800"), reference) is False


def test_quoted_column_is_a_column_and_other_quoted_text_a_string():
    context = 'CREATE TABLE boats (name VARCHAR, "crew_(max)" INTEGER)'
    reference = 'SELECT "crew_(max)" FROM boats WHERE name = "Ada"'
    assert execution_match(context, reference + " AND 1 = 1", reference) is True
    assert execution_match(context, 'SELECT name FROM boats WHERE name = "Ada"', reference) is False
    # A string even where a column is called so: SQLite alone would compare the columns.
    reference = "SELECT crew FROM boats WHERE name = 'harbour'"
    assert (
        execution_match(BOATS, 'SELECT crew FROM boats WHERE name = "harbour" AND 1 = 1', reference) is True
    )


@pytest.mark.parametrize("reference", ["SELECT draught FROM boats", "SELEC name", "", "DELETE FROM boats"])
def test_reference_that_does_not_run(reference):
    assert execution_match(BOATS, reference, reference) is None
    assert execution_match("no tables", CREWS, CREWS) is None
    assert execution_match("CREATE TABLE sqlite_x (a VARCHAR)", "x", "SELECT a FROM sqlite_x") is None


@pytest.mark.parametrize(
    "predicted",
    [
        "",
        "\0",
        "SELECT draught FROM boats",
        "SELECT 'open",
        f"{CREWS}; DROP TABLE boats",
        "DROP TABLE boats",
        "WITH x AS (SELECT name FROM boats) DELETE FROM boats",
        "PRAGMA table_info(boats)",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('x')",
        "SELECT zeroblob(1000000000)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "SELECT a.name FROM boats a, boats b, boats c, boats d, boats e, boats f",
        "SELECT COUNT(*) FROM boats a, boats b, boats c, boats d, boats e, boats f",
        "SELECT name FROM boats WHERE crew > " + "9" * 5000,
        "SELECT name FROM boats WHERE harbour = '\ud800'",
        "SELECT name FROM boats WHERE harbour LIKE '" + "%a" * 300 + "b'",
        "SELECT " + "(" * 1500 + "1" + ")" * 1500,
    ],
)
def test_no_query_does_harm_or_hangs(predicted):
    start = time.perf_counter()
    assert execution_match(BOATS, predicted, CREWS) is False
    assert time.perf_counter() - start < 5


def test_files_stay_untouched(tmp_path):
    for query in (f"ATTACH '{tmp_path}/x' AS x", f"VACUUM INTO '{tmp_path}/x'"):
        assert execution_match(BOATS, query, CREWS) is False
    assert not list(tmp_path.iterdir())


def test_stopped_reference_is_not_counted(monkeypatch):
    heavy = "SELECT COUNT(*) FROM boats a, boats b, boats c, boats d"
    assert execution_match(BOATS, heavy + " ", heavy) is True
    monkeypatch.setattr(sql_execution, "INSTRUCTIONS", 20_000)
    assert execution_match(BOATS, heavy, heavy) is None
    assert execution_match(BOATS, heavy, "SELECT COUNT(*) FROM boats") is False
