"""References to docs/method.md and docs/platform.md, in the form `docs/method.md, Heading`.

A heading that code refers to must be there, and the names of earlier design notes must not come back.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".swift", ".md", ".toml", ".sh")
# A line break inside a comment or docstring, with what the next line begins with.
BREAK = re.compile(r"\s*\n\s*(?:///?|#|\*)?\s*")
REFERENCE = re.compile(r"\b(docs/(?:method|platform)\w*\.md), (?!docs/)")
LINK = re.compile(r"\]\(([\w./-]*\.md)?#([\w-]+)\)")
TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")
NOTES = "METHOD|DESIGN|PLATFORM"
# As a reference: `METHOD.md`, `METHOD: Streams`, `(DESIGN …`, `METHOD's`. A metavar "METHOD" is none.
EARLIER = re.compile(rf"\b(?:{NOTES})(?:\.md\b|:|'s\b)|\((?:{NOTES})\b")


def tracked_files() -> list[Path]:
    """Text files that git knows, this one left out: it names what it forbids."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    paths = [ROOT / name for name in names if name.endswith((*SUFFIXES, "Makefile"))]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def headings(page: str) -> list[str]:
    """Headings of a Markdown file without its fenced blocks, also cut before ` (`."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)
    return re.findall(r"^#+ (.*?)(?: \(.*)?$", text, re.M)


def anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    found = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def wrong_references(text: str) -> Iterator[str]:
    """References in `text` to a file or heading that does not exist."""
    joined = BREAK.sub(" ", text)
    for match in REFERENCE.finditer(joined):
        page, rest = match.group(1), joined[match.end() :]
        if not (ROOT / page).is_file():
            yield f"{page}: no such file"
        elif not any(re.match(re.escape(heading) + r"(?![\w-])", rest) for heading in headings(page)):
            yield f"{page}, {rest[:40]!r}: no such heading"


def test_every_reference_leads_to_a_heading():
    found, wrong = 0, []
    for path in tracked_files():
        text = path.read_text()
        found += len(REFERENCE.findall(BREAK.sub(" ", text)))
        wrong += [f"{path.relative_to(ROOT)}: {problem}" for problem in wrong_references(text)]
    assert not wrong, "\n".join(wrong)
    assert found > 40  # the pattern still finds what the code says


def test_earlier_notes_are_not_referred_to():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if EARLIER.search(line)
    ]
    assert not wrong, "refer to docs/method.md, docs/platform.md or ARCHITECTURE.md:\n" + "\n".join(wrong)


@pytest.mark.parametrize("page", ["docs/method.md", "docs/platform.md"])
def test_links_and_named_tests_exist(page):
    path = ROOT / page
    links = LINK.findall(path.read_text())
    wrong = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in anchors((path.parent / target).resolve() if target else path)
    ]
    files = re.findall(r"\]\(([\w./-]+)\)", path.read_text())
    wrong += [name for name in files if not (path.parent / name).exists()]
    wrong += [name for name in TEST_FILE.findall(path.read_text()) if not (ROOT / name).is_file()]
    assert links and not wrong


@pytest.mark.parametrize(
    "text",
    [
        '"""The walk (docs/method.md, Walking)."""',
        "# docs/method.md, One decoding stepp",
        "/// (docs/platform.md, Neural\n/// Engines)",
        "see docs/methods.md, Walk",
    ],
)
def test_a_wrong_heading_is_found(text):
    assert list(wrong_references(text))


def test_right_headings_are_not():
    text = "(docs/method.md, One decoding\n    step), docs/platform.md, States: "
    text += "docs/method.md, Invariants, 6; docs/method.md"
    assert len(REFERENCE.findall(BREAK.sub(" ", text))) == 3 and not list(wrong_references(text))


@pytest.mark.parametrize(
    "line", ["(METHOD: Walk)", "see DESIGN.md", "# PLATFORM: files", "METHOD's", "(DESIGN, Bundle"]
)
def test_earlier_notes_are_recognised(line):
    assert EARLIER.search(line) and not EARLIER.search('metavar=("METHOD", "MODE")')
