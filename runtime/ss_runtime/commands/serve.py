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
from ss_device.command_line import CommandParser, run_command
from ss_device.errors import UserError
from ss_device.settings import add_settings, settings_of
from ss_runtime.backends import load_openblas
from ss_runtime.serve.listening import listen, make_server, place, resolve
from ss_runtime.serve.printable import printable
from ss_runtime.serve.settings import AccessSettings, AddressSettings, ConnectionSettings, ServeSettings
from ss_runtime.settings import DraftSettings, RuntimeSettings, add_backend
from ss_runtime.tuning import untuned_hint

# Running answers get this long after a signal; the call that runs then must end within the second time.
SHUTDOWN_SECONDS, LAST_CALL_SECONDS = 5, 60
KEY_VARIABLE = "SS_SERVE_API_KEY"


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-serve`; returns the exit code."""
    return run_command(_parser(), serve_command, argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-serve",
        description="Serve a bundle's adapters over HTTP as the OpenAI API does: /v1/chat/completions, "
        "/v1/completions, /v1/models, /health. 'model' names the adapter. Greedy unless a request gives a "
        "temperature.",
        example="ss-serve --bundle build/sqlctx --port 8080",
    )
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="DIR", help="bundle folder made by ss-convert"
    )
    add_settings(parser, AddressSettings)
    add_backend(parser)
    add_settings(parser, RuntimeSettings, only=("dtype", "quantize", "compute_units", "kv_bits"))
    add_settings(parser, DraftSettings, only=("nodes", "lookup"))
    for settings in (ServeSettings, AccessSettings, ConnectionSettings):
        add_settings(parser, settings)
    return parser


def serve_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    bundle = open_bundle(arguments.bundle)
    serve(
        bundle,
        settings_of(arguments, AddressSettings),
        settings_of(arguments, RuntimeSettings),
        settings_of(arguments, DraftSettings),
        settings_of(arguments, ServeSettings),
        settings_of(arguments, AccessSettings),
        settings_of(arguments, ConnectionSettings),
    )


def serve(
    bundle: Bundle,
    at: AddressSettings,
    runtime: RuntimeSettings,
    drafts: DraftSettings,
    settings: ServeSettings,
    access: AccessSettings,
    connections: ConnectionSettings,
) -> None:
    """Serve until Ctrl-C or SIGTERM, which end the process once running answers ended or were cut."""
    runtime.check()
    on_mlx = runtime.backend in (None, "mlx")
    if on_mlx and not (bundle.path / MLX_BASE).is_file():
        raise UserError(f"{bundle.path}: the bundle has no MLX weights (ss-convert --target mlx)")
    family, address = resolve(at.host, at.port)
    rules = access.rules(at.host, address, os.environ.get(KEY_VARIABLE))
    try:
        import uvicorn  # noqa: F401  (for make_server, so that its absence is told now)

        from ss_runtime.serve.app import make_app
        from ss_runtime.serve.engine import Engine
    except ImportError as error:
        raise UserError("ss-serve needs starlette and uvicorn: pip install 'ss-device[runtime]'") from error
    if on_mlx:
        load_openblas()
    with listen(at.host, at.port, family, address) as socket:  # before anything heavy is loaded
        engine = Engine(bundle, runtime, drafts, settings, access.forget_prompts)
        app = make_app(engine, settings.body_limit, settings.max_tokens, rules, access.report_cached)
        seconds = SHUTDOWN_SECONDS + LAST_CALL_SECONDS
        server = make_server(
            app, connections, settings.verbose, seconds, lambda: engine.end_soon(SHUTDOWN_SECONDS)
        )
        _announce(engine, bundle, place(socket))
        gc.freeze()  # what lives as long as the process is not searched for garbage again and again,
        gc.set_threshold(50_000, 20, 20)  # and a large JSON body is not searched while it is read
        # uvicorn ends gracefully at a signal and then raises it again.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[socket])
    _leave()


def _announce(engine, bundle: Bundle, where: str) -> None:
    models, on = printable(", ".join(engine.bank.models)), " in ".join(engine.runs_on.values())
    print(f"{models} at http://{where}/v1 on {on} (Ctrl-C stops it)", file=sys.stderr)
    if engine.untuned:
        print(untuned_hint(bundle, engine.untuned), file=sys.stderr)


def _leave() -> NoReturn:
    """End the process at once, with code 0.

    On a full machine normal interpreter shutdown raced the C++ threads of MLX in 4 of 160 runs: `terminate
    called without an active exception`.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
