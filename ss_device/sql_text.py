"""SQL answers and their CREATE TABLE context as text: literals, columns, forms to compare."""

from __future__ import annotations

import re
from collections.abc import Callable

STRING = re.compile(r"\"([^\"]*)\"|'((?:[^']|'')*)'")
NUMBER = re.compile(r"(?<![\w.\"'])-?\d+(?:\.\d+)?(?![\w.\"'])")
TABLE = re.compile(r"CREATE TABLE (\S+) \(([^()]*)\)")


def literals_as_asked(answer: str, question: str) -> str:
    """The answer with every string literal in the letter case in which the question writes it.

    A literal that stands in the question as it is, or not at all, stays. Data sets lower-case some
    questions and some answers (WikiSQL), so copying would otherwise be taught wrongly.
    """

    def as_asked(match: re.Match) -> str:
        text = match.group(0)[1:-1]
        if not text or text in question:
            return match.group(0)
        at = question.lower().find(text.lower())
        # Lower-casing may change the length of a few letters; then the places do not correspond.
        if at < 0 or len(question.lower()) != len(question):
            return match.group(0)
        quote = match.group(0)[0]
        found = question[at : at + len(text)]
        return match.group(0) if quote in found else f"{quote}{found}{quote}"

    return STRING.sub(as_asked, answer)


def with_permuted_columns(context: str, permutation: Callable[[int], list[int]]) -> str:
    """The CREATE TABLE statements in another order, with the columns of each in another order.

    permutation: n → an order of 0..n-1. A context of any other form is returned as it is.
    """
    statements = context.split("; ")
    if not all(TABLE.fullmatch(s) for s in statements):
        return context
    permuted = []
    for index in permutation(len(statements)):
        name, body = TABLE.fullmatch(statements[index]).groups()
        columns = body.split(", ")
        permuted.append(f"CREATE TABLE {name} ({', '.join(columns[i] for i in permutation(len(columns)))})")
    return "; ".join(permuted)


def without_literals(sql: str) -> str:
    """The query's skeleton: every string and number replaced by `?`, letter case and spaces evened out."""
    return evened(NUMBER.sub("?", STRING.sub("?", sql)))


def evened(sql: str) -> str:
    """The query in lower case with single spaces."""
    return " ".join(sql.lower().split())
