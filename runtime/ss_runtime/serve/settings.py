"""What `ss-serve` can be told: address, models, access, connections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ss_device.command_line import positive, positive_number
from ss_device.errors import UserError
from ss_device.settings import setting
from ss_runtime.serve.access_rules import AccessRules, check_exposure, chosen_key, rules_for

ACCESS, CONNECTIONS = "who may use it", "connections"


@dataclass(frozen=True)
class AddressSettings:
    """Where the server listens."""

    host: str = setting(
        "127.0.0.1", metavar="HOST", help="address to listen on (default: this machine only)"
    )
    port: int = setting(8080, metavar="PORT", help="port (default: 8080; 0: any free one)")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"port {self.port} must lie in 0 … 65535")


@dataclass(frozen=True)
class ServeSettings:
    """Models and requests. adapters: what to load at once, None: all."""

    adapters: tuple[str, ...] | None = setting(
        metavar="A,B",
        parse=lambda text: tuple(name for name in text.split(",") if name),
        help="load only these (default: all; POST /v1/adapters/NAME loads)",
    )
    queue: int = setting(8, parse=positive, help="requests that may wait (default: 8)")
    max_tokens: int = setting(4096, parse=positive, help="largest max_tokens of a request")
    body_limit: int = setting(
        1 << 20, parse=positive, metavar="BYTES", help="largest body (default: 1 MiB)"
    )
    verbose: bool = setting(False, help="log every request")


@dataclass(frozen=True)
class AccessSettings:
    """Who may use the server, and what clients learn of each other."""

    api_key: str | None = setting(
        metavar="KEY", group=ACCESS, help="Bearer token that all but /health needs"
    )
    api_key_file: Path | None = setting(
        metavar="FILE", group=ACCESS, help="file with the key (or set SS_SERVE_API_KEY)"
    )
    without_api_key: bool = setting(
        False, group=ACCESS, help="listen beyond this machine and ask for no key"
    )
    allow_host: tuple[str, ...] = setting(
        (), metavar="NAME", group=ACCESS, help="also answer to this Host header"
    )
    allow_origin: tuple[str, ...] = setting(
        (), metavar="ORIGIN", group=ACCESS, help="let this site's pages call"
    )
    report_cached: bool = setting(
        False, group=ACCESS, help="report cached prompt tokens and seconds in 'usage'"
    )
    forget_prompts: bool = setting(False, group=ACCESS, help="reuse nothing of the previous prompt")

    def rules(self, host: str, address: str, key_of_environment: str | None) -> AccessRules:
        """Raises UserError for settings that would open the server to others by accident."""
        key = chosen_key(self.api_key, self.api_key_file, key_of_environment)
        check_exposure(address, key, self.without_api_key)
        return rules_for(host, address, self.allow_host, self.allow_origin, key)


@dataclass(frozen=True)
class ConnectionSettings:
    """What clients may hold: connections, and seconds for a request and for taking an answer.

    The first byte of a connection has `read_timeout` as well.
    """

    connections: int = setting(100, parse=positive, group=CONNECTIONS, help="open at once (default: 100)")
    read_timeout: float = setting(
        10.0,
        parse=positive_number,
        metavar="SECONDS",
        group=CONNECTIONS,
        help="for a whole request from its first byte (default: 10)",
    )
    write_timeout: float = setting(
        10.0,
        parse=positive_number,
        metavar="SECONDS",
        group=CONNECTIONS,
        help="for a client to take what was sent (default: 10)",
    )
