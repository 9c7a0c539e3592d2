"""`ss-serve`: a bundle behind an OpenAI-compatible HTTP interface."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ss_device.bundle import MLX_BASE, Bundle, open_bundle
from ss_device.command_line import CommandParser, positive, positive_number, run_command
from ss_device.errors import UserError
from ss_runtime.backends import DTYPES, KV_BITS, QUANTIZATIONS, default_dtype, load_openblas
from ss_runtime.serve.access_rules import AccessRules, check_exposure, chosen_key, rules_for
from ss_runtime.serve.listening import listen, make_server, place, resolve
from ss_runtime.serve.printable import printable
from ss_runtime.tuning import untuned_hint

# Running answers get this long after a signal; the call that runs then must end within the second time.
SHUTDOWN_SECONDS, LAST_CALL_SECONDS = 5, 60
KEY_VARIABLE = "SS_SERVE_API_KEY"


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-serve`; returns the exit code."""
    return run_command(_parser(), serve, argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-serve",
        description="Serve a bundle's adapters over HTTP as the OpenAI API does: /v1/chat/completions, "
        "/v1/completions, /v1/models, /health. 'model' names the adapter. Greedy unless a request gives a "
        "temperature.",
        example="ss-serve --bundle build/sqlctx --port 8080",
    )
    add = parser.add_argument
    add("--bundle", type=Path, required=True, metavar="DIR", help="bundle folder made by ss-convert")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8080, help="port (default: 8080; 0: any free one)")
    add("--dtype", choices=DTYPES["mlx"], help="what MLX computes in (default: what suits this machine)")
    add("--adapters", metavar="A,B", help="load only these (default: all; POST /v1/adapters/NAME loads)")
    add("--quantize", choices=QUANTIZATIONS, help="pack the base's matrices: affine 4 or 8 bits, or mxfp4")
    add("--kv-bits", type=int, choices=KV_BITS, help="keep keys and values in 4 or 8 bits")
    add("--nodes", type=positive, metavar="N", help="tree nodes per call (default: the bundle's)")
    add(
        "--lookup",
        action="store_true",
        help="prompt lookup: n-grams of prompt and output compete for the tree's nodes",
    )
    add("--queue", type=positive, default=8, metavar="N", help="requests that may wait (default: 8)")
    add("--max-tokens", type=positive, default=4096, metavar="N", help="largest max_tokens of a request")
    add(
        "--body-limit",
        type=positive,
        default=1 << 20,
        metavar="BYTES",
        help="largest body (default: 1 MiB)",
    )
    add("--verbose", action="store_true", help="log every request")
    _add_access(parser.add_argument_group("who may use it"))
    _add_connections(parser.add_argument_group("connections"))
    return parser


def _add_access(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--api-key", metavar="KEY", help="Bearer token that all but /health needs")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key (or set SS_SERVE_API_KEY)")
    add("--without-api-key", action="store_true", help="listen beyond this machine and ask for no key")
    add("--allow-host", action="append", default=[], metavar="NAME", help="also answer to this Host header")
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help="let this site's pages call")
    add("--report-cached", action="store_true", help="report cached prompt tokens and seconds in 'usage'")
    add("--forget-prompts", action="store_true", help="reuse nothing of the previous prompt")


def _add_connections(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--connections", type=positive, default=100, metavar="N", help="open at once (default: 100)")
    add(
        "--read-timeout",
        type=positive_number,
        default=10.0,
        metavar="SECONDS",
        help="for a whole request from its first byte (default: 10)",
    )
    add(
        "--write-timeout",
        type=positive_number,
        default=10.0,
        metavar="SECONDS",
        help="for a client to take what was sent (default: 10)",
    )


def serve(arguments: argparse.Namespace) -> None:
    """Body of the command. Ctrl-C and SIGTERM end the process, once running answers ended or were cut."""
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"port {arguments.port} must lie in 0 … 65535")
    bundle = open_bundle(arguments.bundle)
    if not (bundle.path / MLX_BASE).is_file():
        raise UserError(f"{bundle.path}: the bundle has no MLX weights (ss-convert --target mlx)")
    host, port = arguments.host, arguments.port
    family, address = resolve(host, port)
    rules = _rules(arguments, address)
    try:
        from ss_runtime.serve.app import make_app
        from ss_runtime.serve.connection import ConnectionLimits
    except ImportError as error:
        raise UserError("ss-serve needs starlette and uvicorn: pip install 'ss-device[runtime]'") from error
    load_openblas()
    limits = ConnectionLimits(arguments.connections, arguments.read_timeout, arguments.write_timeout)
    with listen(host, port, family, address) as socket:  # before anything heavy is loaded
        engine = _engine(arguments, bundle)
        sizes = arguments.body_limit, arguments.max_tokens
        app = make_app(engine, *sizes, rules, arguments.report_cached)
        seconds = SHUTDOWN_SECONDS + LAST_CALL_SECONDS
        server = make_server(
            app, limits, arguments.verbose, seconds, lambda: engine.end_soon(SHUTDOWN_SECONDS)
        )
        _announce(engine, bundle, place(socket))
        gc.freeze()  # what lives as long as the process is not searched for garbage again and again,
        gc.set_threshold(50_000, 20, 20)  # and a large JSON body is not searched while it is read
        # uvicorn ends gracefully at a signal and then raises it again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[socket])
    _leave()


def _rules(arguments: argparse.Namespace, address: str) -> AccessRules:
    """Who may use the server. Raises UserError for options that would open it to others by accident."""
    key = chosen_key(arguments.api_key, arguments.api_key_file, os.environ.get(KEY_VARIABLE))
    check_exposure(address, key, arguments.without_api_key)
    return rules_for(arguments.host, address, arguments.allow_host, arguments.allow_origin, key)


def _engine(arguments: argparse.Namespace, bundle: Bundle):
    from ss_runtime.serve.engine import Engine

    names = arguments.adapters and [name for name in arguments.adapters.split(",") if name]
    return Engine(
        bundle,
        arguments.dtype or default_dtype("mlx"),
        arguments.queue,
        arguments.lookup,
        arguments.nodes,
        names,
        arguments.quantize,
        arguments.kv_bits,
        arguments.forget_prompts,
    )


def _announce(engine, bundle: Bundle, where: str) -> None:
    models = ", ".join([*engine.bank.names, engine.bank.base_name])
    print(f"{printable(models)} at http://{where}/v1 (Ctrl-C stops it)", file=sys.stderr)
    if engine.untuned:
        print(untuned_hint(bundle, engine.untuned), file=sys.stderr)


def _leave() -> NoReturn:
    """End the process at once, with code 0.

    The C++ threads of MLX go away behind the worker thread that had them. On a full machine the
    interpreter's own end overtook them in 4 of 160 runs: `terminate called without an active exception`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
