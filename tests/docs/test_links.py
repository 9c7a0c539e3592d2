"""Links, pictures, make targets and paths in the Markdown files lead to something that exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
README_LINES = 130
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
# First parts of paths that commands make: not in the repository.
MADE = ("build", "runs")
# Paths that stand for a user's own or belong to what a command writes.
EXCEPTIONS = {
    "apps/<name>/app.toml": "any application",
    "models/adapters/mine": "an adapter that the reader trains",
    "models/base/mine": "a base that the reader trains",
    "tuning.json": "ss-bench tune writes it into a bundle",
    "counts.json": "make models writes it into its work folder",
    "metadata.json": "ss-convert writes it for Apple's loader into a bundle",
    "A.json": "results that the reader measured",
    "B.json": "results that the reader measured",
}
FILE = re.compile(r"[\w.@<>{}*-]+(?:/[\w.@<>{}*-]+)+/?|[\w-]+\.(?:py|md|toml|json|png|txt|swift|sh|yml)")


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


MARKDOWN = tracked("*.md")
MANUAL = [name for name in MARKDOWN if name == "README.md" or name.startswith("docs/")]


def prose(name: str) -> str:
    """A Markdown file without its code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", (ROOT / name).read_text()), flags=re.DOTALL)


def slugs(text: str) -> set[str]:
    """Anchors that GitHub gives the headings of a text."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#* *$", text, flags=re.MULTILINE):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        plain = re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", plain)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        seen = found.get(slug, 0)
        found[slug] = seen + 1
        anchors.add(f"{slug}-{seen}" if seen else slug)
    return anchors


def broken_links(name: str) -> list[str]:
    """Relative links of a file that lead nowhere."""
    broken = []
    for target in LINK.findall(re.sub(r"(`+).+?\1", "", prose(name))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, fragment = unquote(target).partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        inside = file.resolve().is_relative_to(ROOT)
        if not (inside and file.exists()) or (fragment and fragment not in slugs(prose_of(file))):
            broken.append(target)
    return broken


def prose_of(file: Path) -> str:
    return FENCE.sub("", file.read_text())


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_lead_somewhere(name):
    assert broken_links(name) == []


def test_links_are_seen():
    """The expressions above find what they are meant to find."""
    assert len(LINK.findall(prose("README.md"))) > 20
    text = "# A *b* `c d`: e_f\n\n## Same\n\n## Same\n\n### [x](y.md), z\n"
    assert slugs(text) == {"a-b-c-d-e_f", "same", "same-1", "x-z"}
    assert LINK.findall('![p](a.png) [t [u]](b.md#c "d") `[no]`') == ["a.png", "b.md#c"]


def test_broken_links_are_noticed(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text(
        "# Here\n[x](b.md) [y](#here) [z](#there) ![p](p.png) [w](https://example.com)\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert broken_links("a.md") == ["b.md", "#there", "p.png"]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def make_targets() -> set[str]:
    lines = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][\w-]*) *:(?!=)", lines, flags=re.MULTILINE))


@pytest.mark.parametrize("name", MANUAL)
def test_make_targets_exist(name):
    text = (ROOT / name).read_text()
    inline = re.findall(r"`make ([a-z][\w-]*)", text)
    lines = [
        word
        for block in FENCE.finditer(text)
        for word in re.findall(r"^make ([a-z][\w-]*)", block[0], re.M)
    ]
    assert set(inline + lines) - make_targets() == set()


def code_paths(name: str) -> set[str]:
    """Code in backticks that looks like a path in this repository or like a file name."""
    return {
        code
        for code in re.findall(r"`([^`\s]+)`", prose(name))
        if FILE.fullmatch(code) and (code.split("/")[0] in top_level() or "/" not in code)
    }


def top_level() -> set[str]:
    return {name.split("/")[0] for name in tracked()} | {
        "ss_runtime",
        "ss_convert",
        "ss_executor",
        "examples",
    }


def exists(code: str, page: Path) -> bool:
    """A path from the root, the page's folder or a folder of packages; a bare name: any tracked file."""
    places = (ROOT, page.parent, ROOT / "runtime", ROOT / "convert", ROOT / "models")
    if "*" in code or "<" in code or "{" in code:
        pattern = re.sub(r"<[^>]*>|\{[^}]*\}", "*", code)
        return any(any(place.glob(pattern)) for place in places)
    if any((place / code).exists() for place in places):
        return True
    return "/" not in code and any(name.endswith(f"/{code}") for name in tracked())


@pytest.mark.parametrize("name", MANUAL)
def test_paths_exist(name):
    page = ROOT / name
    missing = {
        code for code in code_paths(name) if code.split("/")[0] not in MADE and not exists(code, page)
    }
    assert missing - set(EXCEPTIONS) == set()
