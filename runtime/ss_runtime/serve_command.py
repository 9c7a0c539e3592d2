"""`ss-serve`: a bundle behind an OpenAI-compatible HTTP interface."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ss_device.bundle import open_bundle
from ss_device.command_line import CommandParser, positive, run_command
from ss_device.errors import UserError
from ss_runtime.backends import BASE_FILE, DTYPES, KV_BITS, QUANTIZATIONS, default_dtype, load_openblas
from ss_runtime.tuning import untuned_hint

# Running answers get this long after a signal; the call that runs then must end within the second time.
SHUTDOWN_SECONDS, LAST_CALL_SECONDS = 5, 60


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
    add("--dtype", choices=DTYPES["mlx"], help="arithmetic of MLX (default: what suits this machine)")
    add("--adapters", metavar="A,B", help="load only these (default: all; POST /v1/adapters/NAME loads)")
    add("--quantize", choices=QUANTIZATIONS, help="pack the base's matrices: affine 4 or 8 bits, or mxfp4")
    add("--kv-bits", type=int, choices=KV_BITS, help="keep keys and values in 4 or 8 bits")
    add("--nodes", type=positive, metavar="N", help="tree nodes per call (default: the bundle's)")
    add("--lookup", action="store_true", help="copies from prompt and output compete for the tree's nodes")
    add("--queue", type=positive, default=8, metavar="N", help="requests that may wait (default: 8)")
    add("--max-tokens", type=positive, default=4096, metavar="N", help="most a request may ask for")
    add(
        "--body-limit",
        type=positive,
        default=1 << 20,
        metavar="BYTES",
        help="largest body (default: 1 MiB)",
    )
    add("--verbose", action="store_true", help="log every request")
    return parser


def serve(arguments: argparse.Namespace) -> None:
    """Body of the command. Ctrl-C and SIGTERM end the process, once running answers ended or were cut."""
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"port {arguments.port} must lie in 0 … 65535")
    bundle = open_bundle(arguments.bundle)
    if not (bundle.path / BASE_FILE).is_file():
        raise UserError(f"{bundle.path}: the bundle has no MLX weights (ss-convert --target mlx)")
    try:
        import uvicorn

        from ss_runtime.serve.app import make_app
    except ImportError as error:
        raise UserError("ss-serve needs starlette and uvicorn: pip install 'ss-device[runtime]'") from error
    load_openblas()
    from ss_runtime.serve.engine import Engine

    dtype = arguments.dtype or default_dtype("mlx")
    config = uvicorn.Config(
        app="",
        host=arguments.host,
        port=arguments.port,
        log_level="info" if arguments.verbose else "warning",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS + LAST_CALL_SECONDS,
        server_header=False,
    )
    with listening(config) as socket:
        names = arguments.adapters and [name for name in arguments.adapters.split(",") if name]
        drafting = arguments.lookup, arguments.nodes
        packing = arguments.quantize, arguments.kv_bits
        engine = Engine(bundle, dtype, arguments.queue, *drafting, names, *packing)
        config.app = make_app(engine, arguments.body_limit, arguments.max_tokens)
        models = ", ".join([*engine.bank.names, engine.bank.base_name])
        print(f"{models} at http://{_place(socket)}/v1 (Ctrl-C ends)", file=sys.stderr)
        if engine.untuned:
            print(untuned_hint(bundle, engine.untuned), file=sys.stderr)
        # uvicorn ends gracefully at a signal and then raises it again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            _server(config, engine).run(sockets=[socket])
    _leave()


def _leave() -> NoReturn:
    """End the process at once, with code 0.

    The C++ threads of MLX go away behind the worker thread that had them. On a full machine the
    interpreter's own end overtook them in 4 of 160 runs: `terminate called without an active exception`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _server(config, engine):
    """A uvicorn server whose signal handler also tells the engine."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig, frame) -> None:
            engine.end_soon(SHUTDOWN_SECONDS)
            super().handle_exit(sig, frame)

    return Server(config)


def _place(listener) -> str:
    """Host and port of a bound socket, as a URL has them."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(config):
    """A bound socket, taken before anything heavy is loaded: IPv4 where the host has such an address.

    Raises UserError when it cannot be had.
    """
    import socket

    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=config.backlog)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
