"""What became of a case: how the command ended, what it said, and what it left behind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tests.fuzz.cases import Case
from tests.fuzz.child import RAISED, Ended
from tests.fuzz.inputs import REPOSITORY, WORK

HARMLESS = ("ok", "refused", "failed")
# Worst first: a case with several has the first.
DEFECTS = (
    "crash", "hang", "memory", "traceback", "unexpected", "escape", "lost", "outside", "wrong", "control",
    "badjson", "noisy", "unnamed",
)  # fmt: skip
MEANING = {
    "ok": "exit code 0",
    "refused": "exit code 2 and one line that names the file or the thing",
    "failed": "exit code 1 of ss-validate: a back end does not pass",
    "crash": "ended by a signal",
    "hang": "did not end within the time limit",
    "memory": "ran out of memory",
    "traceback": "a Python traceback",
    "unexpected": "an error line that says an error was not expected",
    "escape": "a file outside its own output was changed",
    "lost": "failed, and an earlier output was changed",
    "outside": "a file outside the input was read because the input named it",
    "wrong": "took what a digest says was changed",
    "control": "control characters of a file reached the terminal",
    "badjson": "--json printed what is no strict JSON",
    "noisy": "exit code 2, and more than one line or another one",
    "unnamed": "refused without naming file or thing",
}
# Progress bars return to the line's beginning: that alone is no defect.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
NO_MEMORY = re.compile(
    r"MemoryError|bad_alloc|memory allocation of|Unable to allocate|can't allocate memory"
)
UNEXPECTED = re.compile(
    r"^error: (an )?(unexpected (error|exception|[A-Z]\w+Error)|internal)", re.MULTILINE
)
FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
RAISED_LINE = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Panic\w*|Empty)\w*)\b", re.M
)
PROTECTED = (
    "work/out/earlier/",
    "work/bundle/",
    "work/runs/adapter/",
    "work/runs/lora/",
    "work/runs/base/",
)
NAMES = ("tiny", "second", "shared", "sharded", "wide", "pair", "talk", "bundle", "packed")


@dataclass(frozen=True)
class Outcome:
    """name: of `MEANING`; detail: what tells defects of that name apart; said: the last line of stderr."""

    name: str
    detail: str
    said: str

    @property
    def is_defect(self) -> bool:
        return self.name not in HARMLESS

    @property
    def signature(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


def judge(
    case: Case, what: str, ended: Ended, changed: list[str], outside: list[str], damaged: bool
) -> Outcome:
    """The outcome of a case.

    changed: paths that the command changed; outside: canaries that it read; damaged: the file differs.
    """
    stderr = ended.stderr.decode("utf-8", "replace")
    raised = [found.group() for found in re.finditer(RAISED_LINE.pattern + ".*", stderr, re.MULTILINE)]
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    said = (
        "" if ended.timed_out else (raised[-1] if raised and not last.startswith("error: ") else last)[:300]
    )
    name, detail = _broken(ended, stderr)
    if not name:
        name, detail = _traces(case, ended, changed, outside)
    if not name:
        name, detail = _words(case, what, ended, stderr, damaged)
    return Outcome(name, detail, said)


def _broken(ended: Ended, stderr: str) -> tuple[str, str]:
    """Endings that no input should bring about."""
    if ended.timed_out:
        return "hang", _first_frame(stderr)
    if ended.signal:
        if NO_MEMORY.search(stderr):
            return "memory", _first_frame(stderr)
        return "crash", f"signal {ended.signal} {_first_frame(stderr)}".strip()
    if ended.code == RAISED or "Traceback (most recent call last)" in stderr:
        name = "memory" if NO_MEMORY.search(stderr[-2000:]) else "traceback"
        return name, f"{_exception(stderr)} {_last_frame(stderr)}"
    if UNEXPECTED.search(stderr):
        return "unexpected", stderr.strip()[-200:]
    return "", ""


def _traces(case: Case, ended: Ended, changed: list[str], outside: list[str]) -> tuple[str, str]:
    """What the command left in files, and which it read."""
    allowed = tuple(f"{WORK}/{name}" for name in case.command.writes)
    if case.place == "dangling link" and case.path.startswith(case.command.writes):
        allowed += ("nowhere",)  # an output that is a link is written where the link says
    if escaped := [name for name in changed if not name.startswith(allowed)]:
        return "escape", f"{case.command_name} {escaped[0]}"
    damaged = f"{WORK}/{case.path}"
    lost = [n for n in changed if n.startswith(PROTECTED) and n != damaged and not _is_new(n)]
    if ended.code != 0 and lost:
        return "lost", f"{case.command_name} {lost[0]}"
    if outside and case.place != "link to a canary":
        return "outside", f"{case.kind} {case.command_name} {outside[0]}"
    return "", ""


def _is_new(name: str) -> bool:
    return "/." in name or name.endswith(".partial")


def _words(case: Case, what: str, ended: Ended, stderr: str, damaged: bool) -> tuple[str, str]:
    """What the command said, and with which exit code."""
    stdout = ended.stdout.decode("utf-8", "replace")
    if CONTROL.search(stderr) or (not case.command.speaks and CONTROL.search(stdout)):
        return "control", case.kind
    if case.command.is_json and ended.code in (0, 1) and not _is_strict_json(stdout):
        return "badjson", f"{case.kind} {case.command_name}"
    verified = damaged and not case.sealed and case.path.startswith(case.command.verifies or "-")
    if ended.code == 0:
        return ("wrong", f"{case.kind} {case.command_name}") if verified and _digested(case) else ("ok", "")
    if ended.code == 1 and case.command.program == "ss-validate":
        return "failed", ""
    if ended.code != 2 or not stderr.startswith("error: ") or stderr.count("\n") != 1:
        return "noisy", f"exit code {ended.code}, {_first_words(stderr) or case.command_name}"
    if not _names(case, what, stderr):
        return "unnamed", f"{case.kind}: {_general(stderr)}"
    return "refused", ""


def _digested(case: Case) -> bool:
    """Whether a digest of the file is kept somewhere."""
    listed = case.path.startswith("bundle/") and case.path not in (
        "bundle/manifest.json",
        "bundle/tuning.json",
    )
    return listed or case.path.endswith(("tokenizer.json", ".safetensors"))


PLACE = re.compile(r"error: \S+[/.]\S*: ")
"""An error line that begins with a path, whose unprintable characters are written as escapes."""


def _names(case: Case, what: str, stderr: str) -> bool:
    """Whether the line has a part of the file's path, an application's name or the damaged entry's."""
    words = set(re.findall(r"[A-Za-z_]{3,}", what)) - {"removed", "swapped", "text", "the", "whole", "file"}
    words |= {"weights"}  # a loss that is not finite: nobody knows which of them are to blame
    known = {*case.path.split("/"), *NAMES, *words, case.path.split("/")[-1].split(".")[0]}
    return any(word in stderr for word in known) or "'" in stderr or PLACE.match(stderr) is not None


def _first_words(stderr: str) -> str:
    """What the first line that is no error begins with: a library's notice is the same for all commands."""
    others = [
        line for line in re.split("[\r\n]", stderr) if line.strip() and not line.startswith("error: ")
    ]
    return " ".join(re.findall("[A-Za-z_]+", others[0])[:3]) if others else ""


def _general(message: str) -> str:
    """A message without its numbers, so that the same one is counted as the same."""
    return re.sub(r"-?\d[\d.e+-]*", "N", message.strip())[:100]


def _is_strict_json(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    for piece in [text] if text.startswith("{\n") else text.splitlines():
        try:
            json.loads(piece, parse_constant=refuse)
        except (ValueError, RecursionError):
            return False
    return True


def _exception(stderr: str) -> str:
    found = RAISED_LINE.findall(stderr)
    return found[-1].rpartition(".")[2] if found else "exception"


def _frames(stderr: str) -> list[tuple[str, str]]:
    """(file, line) of every frame, files of this repository by their path in it."""
    return [(_short(file), line) for file, line, _ in FRAME.findall(stderr)]


def _short(file: str) -> str:
    return file.removeprefix(f"{REPOSITORY}/") if file.startswith(str(REPOSITORY)) else file.split("/")[-1]


def _own(frames: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [f for f in frames if "/" in f[0] and not f[0].startswith(("tests/", ".venv/"))]


def _last_frame(stderr: str) -> str:
    """Where it was raised: the innermost frame of the project."""
    frames = _frames(stderr)
    own = _own(frames) or frames
    return ":".join(own[-1]) if own else ""


def _first_frame(stderr: str) -> str:
    """Where it stood when it hung or crashed: faulthandler writes the innermost frame first."""
    frames = _frames(stderr[stderr.rfind("(most recent call first)") :])
    own = _own(frames) or frames
    return ":".join(own[0]) if own else ""
