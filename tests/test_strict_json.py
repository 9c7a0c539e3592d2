"""JSON from untrusted sources."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ss_device.errors import UserError, one_line, printable
from ss_device.names import check_base_name, check_name, inside
from ss_device.strict_json import decode, read_json, typed

DAMAGED = [
    "[" * 100_000, '{"a":' * 100_000, "1" * 100_000, "1e400", "NaN", "-Infinity", '"\\ud800"', "",
    '{"a":1}x', "\x1b[2J",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_no_strict_json_is_one_line(text):
    with pytest.raises(UserError, match="^here: not valid JSON") as caught:
        decode(text, "here")
    assert one_line(caught.value).isprintable() and len(str(caught.value)) < 200


def test_an_overlong_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ss_device.strict_json.FILE_LIMIT", 10)
    (tmp_path / "x.json").write_text('{"a": "0123456789"}')
    with pytest.raises(UserError, match="x.json: 19 bytes, at most 10 are read"):
        read_json(tmp_path / "x.json")


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.sizes) > 3:
            raise UserError("more than three sizes")


@dataclass(frozen=True)
class Outer:
    name: str
    rate: float = 1.0
    inner: Inner | None = None
    more: dict[str, int] = field(default_factory=dict)
    rows: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)


def test_a_record_gets_its_types():
    raw = {"name": "a", "rate": 2, "inner": {"sizes": [1, 2]}, "more": {"x": 1}}
    assert typed(Outer, raw, "here") == Outer("a", 2.0, Inner((1, 2)), {"x": 1})


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([], "Expected 'object', got 'array'"),
        ({}, "missing required field 'name'"),
        ({"name": 1}, "Expected 'str', got 'int' - at 'name'"),
        ({"name": "a", "rate": True}, "Expected 'float', got 'bool' - at 'rate'"),
        ({"name": "a", "rate": float("nan")}, "holds nan, expected finite numbers"),
        ({"name": "a", "inner": {"sizes": [1, "2"]}}, "at 'inner.sizes"),
        ({"name": "a", "more": {"x": 1 << 63}}, "a number beyond 64 bits"),
        ({"name": "a", "color": 1}, r"unknown entry 'color' \(expected by_name, inner"),
        ({"name": "a", "inner": {"size": []}}, r"unknown entry 'size' \(expected sizes\)"),
        ({"name": "a", "rows": [{}, {"size": []}]}, r"unknown entry 'size'"),
        ({"name": "a", "by_name": {"x": {"size": []}}}, r"unknown entry 'size'"),
        ({"name": "a", "inner": {"sizes": [1, 2, 3, 4]}}, "more than three sizes"),
    ],
)
def test_a_wrong_entry_is_named(raw, says):
    with pytest.raises(UserError, match=f"^here: .*{says}"):
        typed(Outer, raw, "here")


@pytest.mark.parametrize("name", ["sqlctx", "a", "0.b_c-D", "x" * 100])
def test_names_that_may_be_files(name):
    assert check_name(name, "adapter") == name


BAD_NAMES = ["", ".", "..", ".x", "-x", "a/b", "../a", "/a", "a b", "a\n", "a\0", "ü", "x" * 101, None, 3]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_other_names_are_refused(name):
    with pytest.raises(UserError, match="^adapter .* is no name"):
        check_name(name, "adapter")


def test_a_base_may_have_an_organisation():
    assert check_base_name("org/model-1", "base") == "org/model-1"
    for name in ("../x", "a/b/c", "/x", "org/", "org/.."):
        with pytest.raises(UserError, match="is no name"):
            check_base_name(name, "base")


def test_paths_stay_inside_their_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to(tmp_path)
    assert inside(tmp_path / "in", "a/b.json", "x") == tmp_path / "in" / "a" / "b.json"
    for name in ("/etc/passwd", "../x", "a/../../x", "out/x", "", "a\0b", "a\x1bb", None, 5, "..\\x"):
        with pytest.raises(UserError, match="^x: "):
            inside(tmp_path / "in", name, "x")


def test_what_moves_a_terminals_cursor_is_written_as_an_escape():
    assert printable("a\x1b[2Jb\ud800\n") == "a\\x1b[2Jb\\ud800\\n"
    assert printable("größer ≥ 1") == "größer ≥ 1"
