"""The HTTP server in this process: one request, its body read from a file, answered by a real engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROUTES = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


def main(arguments: list[str]) -> int:
    """Post the file's bytes. 0: answered; 2: refused with an error in the API's form, printed as a line.

    Anything else raises: a server error is a defect, as is an error that is not of the API's form.
    """
    from ss_device.command_line import CommandParser, run_command

    parser = CommandParser(prog="server")
    parser.add_argument("route", choices=ROUTES)
    parser.add_argument("body", type=Path)
    return run_command(parser, _post, arguments)


def _post(arguments) -> None:
    from starlette.testclient import TestClient

    from ss_device.bundle import open_bundle
    from ss_device.errors import UserError
    from ss_runtime.serve.app import make_app
    from ss_runtime.serve.engine import Engine
    from ss_runtime.serve.settings import ServeSettings
    from ss_runtime.settings import RuntimeSettings

    if not arguments.body.is_file():
        raise UserError(f"{arguments.body}: no such file")
    body = arguments.body.read_bytes()
    runtime = RuntimeSettings(dtype="float32")
    engine = Engine(open_bundle("bundle"), runtime, settings=ServeSettings(queue=2))
    with TestClient(make_app(engine, 1 << 20, 8)) as client:
        answer = client.post(ROUTES[arguments.route], content=body)
    if answer.status_code >= 500:
        raise AssertionError(f"status {answer.status_code}: {answer.text[:300]}")
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        print(answer.text)
    elif answer.status_code == 200:
        print(json.dumps(answer.json()["usage"]), file=sys.stdout)
    else:
        raise UserError(f"{arguments.body}: {answer.json()['error']['message']}")
