"""Execution accuracy of generated SQL, over tables made up from the prompt's CREATE TABLE statements.

Both queries run in SQLite on several small databases. Their values come from the literals of both queries,
so that queries of another column, aggregate, condition or operator most likely give another result, while
another way to write the same query gives the same one. This is the idea of test suites (Zhong et al. 2020).
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from random import Random

from ss_device.sql_text import STRING, evened

ROWS = 24
"""Rows per table."""
DATABASES = 10
"""Databases to compare a pair of queries on; on one, a highest value may survive a dropped condition."""
UNSATISFIED = 4
"""So many of them satisfy one of the reference's conditions nowhere: they tell COUNT(*) > 0 apart."""
COPIED_SHARE = 0.1
"""Share of rows that repeat another but for keys and sort columns; they tell DISTINCT apart."""
NULL_SHARE = 0.25
"""Share of NULL in columns under COUNT; with 0, COUNT(a) and COUNT(b) would always be equal."""
INSTRUCTIONS = 2_000_000
"""SQLite virtual machine instructions after which a query is stopped."""
RESULT_ROWS = 20_000
"""A query with more rows counts as stopped."""

_CHECK_EVERY = 10_000
_LONGEST = 20_000
# The part of a query that steers the values: a generated text that repeats itself may be long.
_READ = 2_000
# Whole numbers beyond are no SQLite integers once others are added to them.
_LARGEST = 10**18
_ACTIONS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
# Without the functions that make large values or reach outside (zeroblob, printf, load_extension).
_FUNCTIONS = frozenset(
    (
        *("avg", "count", "group_concat", "max", "min", "sum", "total"),
        *("date", "datetime", "julianday", "strftime", "time"),
        *("instr", "length", "like", "lower", "ltrim", "rtrim", "substr", "substring", "trim", "upper"),
        *("abs", "coalesce", "ifnull", "iif", "nullif", "round"),
    )
)

_STATEMENT = re.compile(r"CREATE TABLE (\S+) \((.*)\)\s*;?", re.IGNORECASE | re.DOTALL)
_COMMA = re.compile(r",\s*(?![^()]*\))")
_DECLARATION = re.compile(r"(\"[^\"]+\"|\S+)\s*(.*)", re.DOTALL)

_NAME = r"(?:(\w+)\.)?(\w+)"
_COLUMN = rf"(?<![\w.']){_NAME}"
_LITERAL = r"(?:'(?:[^']|'')*'|-?\d+(?:\.\d+)?(?![\w.]))"
_LITERALS = re.compile(_LITERAL)
_SUM = re.compile(r"'(?:[^']|'')*'|(?<![\w.'])(\d{1,15})\s*([+-])\s*(\d{1,15})(?![\w.'])")
_CONDITIONS = (
    re.compile(rf"{_COLUMN}\s*(<>|!=|<=|>=|==?|<|>|\bNOT\s+LIKE\b|\bLIKE\b)\s*({_LITERAL})", re.IGNORECASE),
    re.compile(rf"{_COLUMN}\s+(NOT\s+IN|IN)\s*\(\s*({_LITERAL}(?:\s*,\s*{_LITERAL})*)\s*\)", re.IGNORECASE),
    re.compile(rf"{_COLUMN}\s+(BETWEEN)\s+({_LITERAL}\s+AND\s+{_LITERAL})", re.IGNORECASE),
)
_SUMMED = re.compile(rf"\b(?:SUM|AVG|TOTAL)\s*\(\s*(?:DISTINCT\s+)?{_NAME}\s*\)", re.IGNORECASE)
_COUNTED = re.compile(rf"\bCOUNT\s*\(\s*(?:DISTINCT\s+)?{_NAME}\s*\)", re.IGNORECASE)
_SORTED = re.compile(rf"\bORDER\s+BY\s+(?:\w+\s*\(\s*)?{_NAME}", re.IGNORECASE)
_SELECTED = rf"SELECT\s+(?:DISTINCT\s+)?{_NAME}\s+FROM\b"
_LINKS = (
    re.compile(rf"{_COLUMN}\s*=\s*{_COLUMN}", re.IGNORECASE),
    re.compile(rf"{_COLUMN}\s+(?:NOT\s+)?IN\s*\(\s*{_SELECTED}", re.IGNORECASE),
    re.compile(
        rf"{_SELECTED}(?:(?!\bSELECT\b).)*?\b(?:EXCEPT|INTERSECT|UNION)\s+(?:ALL\s+)?{_SELECTED}",
        re.IGNORECASE | re.DOTALL,
    ),
)

Key = tuple[str, str]
"""Table and column, in lower case."""
Value = str | int | float
Row = tuple
Schema = dict[str, dict[str, str]]
"""Table → column → declared type, names in lower case."""


def execution_match(context: str, predicted: str, reference: str, seed: int = 0) -> bool | None:
    """Whether both queries give the same rows on all databases made up for the tables of `context`.

    Rows are compared in order only where the reference has ORDER BY at its top level. Letter case does not
    matter, and numbers may differ by 1e-6. Where neither query has a result on any database (no row, or
    only NULL and 0), their texts are compared (`evened`), because equal nothing says nothing.

    context: CREATE TABLE statements, separated by "; ". seed: of the values in the tables.
    Returns None where SQLite cannot run the reference within `INSTRUCTIONS` and `RESULT_ROWS`; False also
    where the predicted query fails, is no single SELECT or is stopped. No query raises an error.
    """
    schema = _schema(context)
    quoted = {name.lower() for name in re.findall(r'"([^"]+)"', context)}
    wanted, given = (_Query.read(sql, schema, quoted) for sql in (reference, predicted))
    same_text = evened(predicted) == evened(reference)
    tables = _Tables(schema, wanted, given)
    any_result = False
    for index in range(DATABASES):
        rows = tables.filled(Random(f"{seed} {index}"), index)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            if not _filled(database, schema, rows):
                return None
            _read_only(database)
            expected = _result(database, wanted.sql)
            if expected is None:
                return None
            if same_text:
                return True
            result = _result(database, given.sql)
        if result is None or not _same_rows(expected, result, wanted.ordered):
            return False
        any_result = any_result or any(value not in (None, 0) for row in expected for value in row)
    return any_result


def _schema(context: str) -> Schema:
    schema: Schema = {}
    for statement in context.split("; "):
        match = _STATEMENT.fullmatch(statement.strip())
        if match:
            declarations = [_DECLARATION.fullmatch(part.strip()) for part in _COMMA.split(match[2])]
            columns = {d[1].strip('"').lower(): d[2].upper() for d in declarations if d}
            schema[match[1].strip('"').lower()] = columns
    return schema


@dataclass(frozen=True)
class _Condition:
    """A column's comparison with literals, read off a query's text."""

    operator: str
    literals: tuple[Value, ...]

    def holds(self, value: Value) -> bool:
        if self.operator.endswith("LIKE"):
            return _like(str(value), str(self.literals[0])) == (self.operator == "LIKE")
        left, *right = _comparable([value, *self.literals])
        if self.operator.endswith("IN"):
            return (left in right) == (self.operator == "IN")
        if self.operator == "BETWEEN":
            return right[0] <= left <= right[1]
        return {
            "=": left == right[0],
            "!=": left != right[0],
            "<": left < right[0],
            "<=": left <= right[0],
            ">": left > right[0],
            ">=": left >= right[0],
        }[self.operator]


def _like(text: str, pattern: str) -> bool:
    """LIKE without `_`, in linear time, which a regular expression would not promise."""
    start, *parts = pattern.split("%")
    if not parts:
        return text == start
    at = len(start)
    for part in parts[:-1]:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.startswith(start) and text.endswith(parts[-1]) and at + len(parts[-1]) <= len(text)


def _comparable(values: list[Value]) -> list:
    """All as numbers where all are, else all as strings."""
    return [str(v) for v in values] if any(isinstance(v, str) for v in values) else values


@dataclass
class _Query:
    """A query to run, and what its text says about the columns."""

    sql: str
    ordered: bool = False
    conditions: dict[Key, list[_Condition]] = field(default_factory=dict)
    links: list[tuple[Key, Key]] = field(default_factory=list)
    counted: set[Key] = field(default_factory=set)
    summed: set[Key] = field(default_factory=set)
    sorted_by: set[Key] = field(default_factory=set)
    literals: list[Value] = field(default_factory=list)

    @classmethod
    def read(cls, sql: str, schema: Schema, quoted: set[str]) -> _Query:
        query = cls(_runnable(sql, quoted))
        text = _SUM.sub(lambda m: str(int(m[1]) + int(m[2] + m[3])) if m[1] else m[0], query.sql)[:_READ]
        aliases = _aliases(text, schema)

        def keys(qualifier: str | None, column: str) -> list[Key]:
            tables = aliases.get(qualifier.lower(), set()) if qualifier else schema
            return [(table, column.lower()) for table in tables if column.lower() in schema[table]]

        query.ordered = _ordered(text)
        query.literals = [_value(literal) for literal in _LITERALS.findall(text)]
        for pattern in _CONDITIONS:
            for qualifier, column, operator, literals in pattern.findall(text):
                condition = _Condition(_operator(operator), tuple(map(_value, _LITERALS.findall(literals))))
                for key in keys(qualifier, column):
                    known = query.conditions.setdefault(key, [])
                    if condition not in known:
                        known.append(condition)
        for pattern in _LINKS:
            for match in pattern.findall(text):
                query.links += [(a, b) for a in keys(*match[:2]) for b in keys(*match[2:])]
        for pattern, found in (
            (_COUNTED, query.counted),
            (_SUMMED, query.summed),
            (_SORTED, query.sorted_by),
        ):
            for match in pattern.findall(text):
                found.update(keys(*match))
        return query


def _runnable(sql: str, quoted: set[str]) -> str:
    """The query with lower-case literals in single quotes; names that the context quotes stay names."""

    def literal(match: re.Match) -> str:
        double, single = match.groups()
        if double is not None and double.lower() in quoted:
            return match.group(0)
        text = single.replace("''", "'") if double is None else double
        return "'" + text.lower().replace("'", "''") + "'"

    sql = sql.encode("utf-8", "replace").decode("utf-8")  # Half a surrogate pair fits no database.
    return STRING.sub(literal, sql).strip().rstrip("; ")


def _aliases(text: str, schema: Schema) -> dict[str, set[str]]:
    """Name or alias → tables it may stand for: subqueries often use an alias again."""
    aliases = {table: {table} for table in schema}
    for table, alias in re.findall(r"\b(?=(\w+)(?:\s+AS)?\s+(\w+))", text, re.IGNORECASE):
        if table.lower() in schema:
            aliases.setdefault(alias.lower(), set()).add(table.lower())
    return aliases


def _value(literal: str) -> Value:
    if literal.startswith("'"):
        return literal[1:-1].replace("''", "'")
    number = max(-_LARGEST, min(_LARGEST, float(literal)))
    return number if "." in literal or abs(number) == _LARGEST else int(literal)


def _operator(text: str) -> str:
    operator = " ".join(text.upper().split())
    return {"<>": "!=", "==": "="}.get(operator, operator)


def _ordered(text: str) -> bool:
    """Whether ORDER BY stands outside of all brackets."""
    text, before = STRING.sub("''", text), ""
    while text != before:
        text, before = re.sub(r"\([^()]*\)", "", text), text
    return re.search(r"\bORDER\s+BY\b", text, re.IGNORECASE) is not None


@dataclass
class _Filling:
    """What the rows of one database are made of."""

    rng: Random
    first: int
    """Rows of a table that satisfy the reference, and values of a group that belong to them."""
    values: dict[Key, list[Value]]
    choices: list[dict[Key, tuple[list, list, list]]]
    """Of each query: see `_Tables._choices`."""
    never: Key | None
    """Column whose conditions hold in no row, of a database without a result."""


class _Tables:
    """Makes up rows for the tables of two queries.

    A table's first rows satisfy the reference, most of the others all its conditions but one: they tell
    apart a query without that condition, or with another. Some rows do so for the predicted query. Columns
    that are joined or named alike share values, whose first ones belong to the satisfying rows.
    """

    def __init__(self, schema: Schema, wanted: _Query, given: _Query) -> None:
        self.schema, self.queries = schema, (wanted, given)
        self.counted = wanted.counted | given.counted
        self.sorted_by = wanted.sorted_by | given.sorted_by
        self.group = _groups(schema, wanted.links + given.links)
        self.members: dict[Key, list[Key]] = {}
        for key, group in self.group.items():
            self.members.setdefault(group, []).append(key)
        self.unique = {key for key in self.group if self._is_unique(key)}
        self.stray = sorted({v for query in self.queries for v in query.literals}, key=str)
        self.numeric = {group: self._is_numeric(members) for group, members in self.members.items()}
        self.near = {group: self._near(members) for group, members in self.members.items()}

    def _is_unique(self, key: Key) -> bool:
        """Whether a column looks like its table's primary key: id, or Semesters (semester_id)."""
        table, column = key
        stem = re.fullmatch(r"(.*?)_?id", column)
        if stem is None or any(key in query.conditions for query in self.queries):
            return False
        return stem[1] == "" or (table.startswith(stem[1]) and "_" not in table[len(stem[1]) :])

    def _is_numeric(self, members: list[Key]) -> bool:
        compared = [c for query in self.queries for key in members for c in query.conditions.get(key, ())]
        return (
            any(_storage(self.schema[table][column]) != "TEXT" for table, column in members)
            or any(key in query.summed for query in self.queries for key in members)
            or any(not isinstance(literal, str) for c in compared for literal in c.literals)
        )

    def _near(self, members: list[Key]) -> list[Value]:
        """The literals these columns are compared with, and values next to them."""
        values: dict[Value, None] = {}
        for query in self.queries:
            for key in members:
                for condition in query.conditions.get(key, ()):
                    for literal in condition.literals:
                        values.update(dict.fromkeys(_around(literal, condition.operator)))
        return list(values)

    def filled(self, rng: Random, index: int) -> dict[str, list[Row]]:
        """Table → rows, for the database of this index."""
        values = {group: self._values(group, rng) for group in self.members}
        choices = [self._choices(query, values) for query in self.queries]
        compared = [key for key, (_, _, others) in choices[0].items() if others]
        unsatisfied = index - (DATABASES - UNSATISFIED)
        never = compared[unsatisfied % len(compared)] if compared and unsatisfied >= 0 else None
        filling = _Filling(rng, rng.randint(3, 6), values, choices, never)
        return {
            table: self._rows([(table, column) for column in columns], filling)
            for table, columns in self.schema.items()
        }

    def _rows(self, keys: list[Key], filling: _Filling) -> list[Row]:
        rng, first = filling.rng, filling.first
        kinds = ["fits"] * first + ["near"] * first
        kinds += rng.choices(("fits", "near", "any"), (10, 60, 30), k=ROWS - len(kinds))
        kept = [key in self.unique or key in self.sorted_by for key in keys]
        rows: list[Row] = []
        for index, kind in enumerate(kinds):
            row = self._row(keys, index, kind, filling)
            if rows and rng.random() < COPIED_SHARE:
                row = tuple(
                    own if keep else copy for own, copy, keep in zip(row, rows[-1], kept, strict=True)
                )
            rows.append(row)
        rng.shuffle(rows)
        return rows

    def _values(self, group: Key, rng: Random) -> list[Value]:
        members = self.members[group]
        distinct = any(key in self.unique or key in self.sorted_by for key in members)
        size = ROWS if distinct else rng.choice((4, 8, 16))
        near = self.near[group]
        if self.numeric[group]:
            values = _numbers(size, [v for v in near if not isinstance(v, str)], rng)
        else:
            kinds = {self.schema[table][column] for table, column in members}
            values = _strings(size, not kinds.isdisjoint(("DATE", "DATETIME", "TIME")), rng)
        if near and not distinct:
            values += near
        elif self.stray and not distinct:
            values.append(rng.choice(self.stray))
        rng.shuffle(values)
        return values

    def _choices(self, query: _Query, values: dict[Key, list[Value]]) -> dict[Key, tuple[list, list, list]]:
        """Compared column → values that satisfy most of its conditions, others near literals, others."""
        choices = {}
        for key, conditions in query.conditions.items():
            candidates = list(dict.fromkeys(self.near[self.group[key]] + values[self.group[key]]))
            held = [sum(c.holds(value) for c in conditions) for value in candidates]
            fits = [v for v, n in zip(candidates, held, strict=True) if n == max(held)]
            others = [v for v, n in zip(candidates, held, strict=True) if n < max(held)]
            near = set(self.near[self.group[key]])
            choices[key] = (fits, [v for v in others if v in near] or others, others)
        return choices

    def _row(self, keys: list[Key], index: int, kind: str, filling: _Filling) -> Row:
        """A row that satisfies a query's conditions ("fits"), all but one ("near"), or any ("any")."""
        rng, first = filling.rng, filling.first
        choices = filling.choices[index >= first and rng.random() < 0.2]
        compared = [key for key in keys if key in choices and choices[key][2]]
        broken = rng.choice(compared) if kind == "near" and compared else None
        row = []
        for key in keys:
            pool = filling.values[self.group[key]]
            if key in self.unique:
                value: Value | None = pool[index]
            elif key == broken or (key == filling.never and key in compared):
                value = rng.choice(choices[key][rng.choice((1, 2))])
            elif key in choices and kind != "any":
                value = rng.choice(choices[key][0])
            elif len(self.members[self.group[key]]) > 1:
                parts = (pool[:first], pool[first : 2 * first] or pool, pool)
                value = rng.choice(rng.choices(parts, (50, 35, 15))[0])
            else:
                value = rng.choice(pool)
            # An identifier is never NULL in practice, and COUNT(*) is a good answer for COUNT(id).
            if key in self.counted and not key[1].endswith("id") and rng.random() < NULL_SHARE:
                value = None
            row.append(value)
        return tuple(row)


def _groups(schema: Schema, links: Iterable[tuple[Key, Key]]) -> dict[Key, Key]:
    """Column → the column that stands for all it shares values with."""
    group = {(table, column): (table, column) for table, columns in schema.items() for column in columns}
    named: dict[str, Key] = {}
    alike = [(key, named.setdefault(key[1], key)) for key in group]
    for a, b in [*alike, *links]:
        if group[a] != group[b]:
            old, new = group[a], group[b]
            group.update({key: new for key, root in group.items() if root == old})
    return group


def _around(literal: Value, operator: str) -> list[Value]:
    if not isinstance(literal, str):
        return [literal, literal - 1, literal + 1]
    if operator.endswith("LIKE"):
        text = literal.strip("%")
        return [text, text + " x", "x " + text, "x " + text + " x", text[:-1]]
    return [literal, literal + " x", "x " + literal, literal[:-1]]


def _numbers(count: int, near: list[int | float], rng: Random) -> list[Value]:
    """Whole numbers, half of them in the neighbourhood of given ones."""
    values: dict[Value, None] = {}
    while len(values) < count:
        if near and len(values) % 2:
            centre = rng.choice(near)
            spread = max(2 * count, abs(int(centre)) // 4)
            values[int(centre) + rng.randint(-spread, spread)] = None
        else:
            values[rng.randint(1, 1000)] = None
    return list(values)


def _strings(count: int, times: bool, rng: Random) -> list[Value]:
    values: dict[Value, None] = {}
    while len(values) < count:
        if times:
            text = f"{rng.randint(1990, 2020)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        else:
            text = "".join(rng.choice(letters) for letters in ("bdfghklmnprstvwz", "aeiou") * 3)
        values[text] = None
    return list(values)


def _filled(database: sqlite3.Connection, schema: Schema, tables: dict[str, list[Row]]) -> bool:
    """Creates the tables; False where SQLite refuses one."""
    try:
        database.execute("BEGIN")
        for table, columns in schema.items():
            declared = ", ".join(
                f'"{name}" {_storage(kind)} COLLATE NOCASE' for name, kind in columns.items()
            )
            database.execute(f'CREATE TABLE "{table}" ({declared})')
            places = ", ".join("?" * len(columns))
            database.executemany(f'INSERT INTO "{table}" VALUES ({places})', tables[table])
        database.execute("COMMIT")
    except sqlite3.Error:
        return False
    return True


def _read_only(database: sqlite3.Connection) -> None:
    """Lets the connection's further statements only read, and limits their size."""
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _LONGEST)
    database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000)
    database.setlimit(sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20)

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        allowed = action in _ACTIONS or (action == sqlite3.SQLITE_FUNCTION and second.lower() in _FUNCTIONS)
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    database.set_authorizer(authorize)


def _storage(kind: str) -> str:
    """A type SQLite knows, of the declared type's affinity."""
    if "INT" in kind:
        return "INTEGER"
    return "REAL" if re.search("FLOAT|REAL|NUM|DEC|DOUBLE", kind) else "TEXT"


def _result(database: sqlite3.Connection, sql: str) -> list[Row] | None:
    """The query's rows with strings in lower case; None where it fails or takes too long."""
    if not re.match(r"(?:SELECT|WITH)\b", sql, re.IGNORECASE):
        return None
    checks = 0

    def stop() -> bool:
        nonlocal checks
        checks += 1
        return checks > INSTRUCTIONS // _CHECK_EVERY

    database.set_progress_handler(stop, _CHECK_EVERY)
    try:
        rows = database.execute(sql).fetchmany(RESULT_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError):
        return None
    if len(rows) > RESULT_ROWS:
        return None
    return [tuple(v.lower() if isinstance(v, str) else v for v in row) for row in rows]


def _same_rows(expected: list[Row], result: list[Row], ordered: bool) -> bool:
    if len(expected) != len(result):
        return False
    if not ordered:
        expected, result = sorted(expected, key=_order), sorted(result, key=_order)
    return all(
        len(a) == len(b) and all(map(_same_value, a, b)) for a, b in zip(expected, result, strict=True)
    )


def _order(row: Row) -> list[tuple]:
    """Sorts NULL, numbers, strings and bytes; numbers that may be equal stay together."""
    return [
        (0, 0) if v is None else (2, str(v)) if isinstance(v, str | bytes) else (1, round(v, 4))
        for v in row
    ]


def _same_value(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6)
    return a == b
