"""Chat templates of strangers, rendered by a process of their own with bounds on time and memory.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and objects, but not
from looping or filling memory: `{% for i in range(99999) %}` thrice nested, or `('a' * 99999) * 99999`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from ss_device.chat_template import ChatTemplate
from ss_device.errors import UserError, one_line
from ss_device.strict_json import decode_object

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import SandboxedEnvironment

SECONDS = 5.0
MEGABYTES = 512
TEXT_LIMIT = 1 << 24
"""Characters of a rendered conversation."""


class TemplateProcess:
    """Renders one template again and again, by a process that starts at the first use and ends with us."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def render(self, messages: list[dict], open_next: bool = True) -> str:
        """The text of messages, dicts with `role` and `content`.

        open_next: up to where the assistant writes, not to the end of the last message.

        Raises UserError when the template refuses them, is no template, or needs too much time or memory.
        """
        with self._lock:
            return self._answer({"messages": messages, "add_generation_prompt": open_next})

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _answer(self, request: dict) -> str:
        process = self._started()
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self.close()
            raise UserError(
                f"the base's chat template took more than {SECONDS:.0f} seconds or {MEGABYTES} MB; "
                "it was stopped"
            )
        answer = decode_object(line, "chat template")
        if "error" in answer:
            raise UserError(f"the base's chat template refuses these messages: {answer['error']}")
        return answer["text"]

    def _started(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            self.close()
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, env=paths)
            self._process.stdin.write(json.dumps(asdict(self._template)).encode() + b"\n")
            self._process.stdin.flush()
            self._process.stdout.readline()  # its start does not count
        return self._process


def serve_requests() -> None:
    """Body of the process: a line with the template, then one line in and one line out per conversation."""
    limit_memory()
    first = json.loads(sys.stdin.buffer.readline())
    compiled = cache(template_environment().from_string)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        answer = rendered(lambda: compiled(first["template"]), first["special"] | json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def template_environment() -> SandboxedEnvironment:
    """Jinja's sandbox with what transformers adds to it for chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` … `{% endgeneration %}` around what an assistant wrote: no text of its own."""

        tags: ClassVar = {"generation"}

        def parse(self, parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line
            )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = to_json
    return environment


def to_json(value: object, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def rendered(template: Callable[[], Template], variables: dict) -> dict[str, str]:
    """`text`, or `error` in one line. template: makes the compiled one, or raises what is wrong with it."""
    try:
        text = template().render(**variables)
    except MemoryError:
        return {"error": f"it needs more than {MEGABYTES} MB"}
    except Exception as error:  # a template can raise whatever Python's operators do
        return {"error": f"{one_line(error):.300}"}
    if len(text) > TEXT_LIMIT:
        return {"error": f"its text has {len(text)} characters, at most {TEXT_LIMIT} are taken"}
    return {"text": text}


def limit_memory() -> None:
    """Bound this process's memory and processor time, where the system does that."""
    import resource

    for kind, most in ((resource.RLIMIT_AS, MEGABYTES << 20), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # macOS does not bound address space; the time limit holds there
            continue


if __name__ == "__main__":
    serve_requests()
