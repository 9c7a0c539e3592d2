"""Who may use a server: host names it answers to, web pages that may call it, the API key."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ss_device.errors import UserError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
NAME = r"\[[0-9a-f:.]+\]|[a-z0-9._-]+"
HOST = re.compile(rf"({NAME})(:\d{{1,5}})?")
ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://({NAME})(:\d{{1,5}})?")
KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class AccessRules:
    """names: what a Host header may say (its port does not matter); any_address: so may every IP address;
    origins: pages that may call, as browsers name them (`https://chat.example`); key: None asks for none.
    """

    names: frozenset[str] = LOCAL_NAMES
    any_address: bool = False
    origins: frozenset[str] = frozenset()
    key: str | None = None

    def host_fits(self, header: str | None) -> bool:
        """Whether a Host header names this server. A page that had its own name resolved to this
        machine (DNS rebinding) still sends that name."""
        match = HOST.fullmatch((header or "").lower())
        if match is None:
            return False
        name = plain_name(match[1])
        return name in self.names or (self.any_address and _is_address(name))

    def origin_fits(self, header: str | None) -> bool:
        """Whether a request with this Origin header, None where it has none, may be answered."""
        return header is None or header.lower() in self.origins

    def key_fits(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries the key, compared in constant time."""
        if self.key is None:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.key.encode())
        return same and scheme.lower() == "bearer"


def rules_for(
    host: str, address: str, names: Sequence[str], origins: Sequence[str], key: str | None
) -> AccessRules:
    """Rules of a server that listens on `address`, which `host` resolved to.

    Behind a wildcard address (0.0.0.0, ::) any IP address is a good name: pages get at this machine by
    names that they own, not by numbers. Raises UserError for names and origins that are none.
    """
    allowed = {plain_name(name.lower()) for name in (*names, host, address)}
    for name in names:
        if not re.fullmatch(NAME, name.lower()):
            raise UserError(f"--allow-host '{name}' is not a host name (without scheme and port)")
    for origin in origins:
        if not ORIGIN.fullmatch(origin.lower()):
            raise UserError(f"--allow-origin '{origin}' is not an origin such as https://chat.example:8443")
    anywhere = ipaddress.ip_address(address).is_unspecified
    return AccessRules(LOCAL_NAMES | allowed, anywhere, frozenset(o.lower() for o in origins), key)


def plain_name(name: str) -> str:
    """A host name, or an IP address without brackets in its shortest form."""
    name = name.strip("[]")
    return str(ipaddress.ip_address(name)) if _is_address(name) else name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        return False


def chosen_key(option: str | None, file: Path | None, environment: str | None) -> str | None:
    """The API key that was given, the option before the file before the environment.

    Raises UserError for a key that no header can carry; the key itself is in no message.
    """
    if option is not None and file is not None:
        raise UserError("give --api-key or --api-key-file, not both")
    key, where = (environment or None), "SS_SERVE_API_KEY"
    if file is not None:
        try:
            key, where = file.read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: not a readable file with an API key") from error
    elif option is not None:
        key, where = option, "--api-key"
    if key is not None and not KEY.fullmatch(key):
        raise UserError(f"{where}: an API key is one line of printable ASCII without spaces")
    return key


def check_exposure(address: str, key: str | None, without_key: bool) -> None:
    """UserError for a server without a key that other machines could reach, unless it was asked for."""
    if key is None and not without_key and not ipaddress.ip_address(address).is_loopback:
        raise UserError(
            f"{address} is open to other machines: give an API key (--api-key-file, SS_SERVE_API_KEY), "
            "or --without-api-key"
        )
