"""Reads the hive's own keys (the admin key and the clients' keys), and refuses to expose a gateway without them.

Episodes have separate keys, which gateways sign and agents use.
"""

import argparse
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bombus.errors import Code, Refused
from bombus.hive.subjects import check_name

log = logging.getLogger(__name__)

ADMIN_VARIABLE, CLIENT_VARIABLE, CLIENTS_VARIABLE = KEY_VARIABLES = (
    "BOMBUS_ADMIN_KEY",
    "BOMBUS_CLIENT_KEY",
    "BOMBUS_CLIENT_KEYS",
)
NAMED_KEYS_MAX = 1000
T = TypeVar("T")
SDK_PREFIX = b"tml-"  # Tinker's client requires this prefix, so it may be put before a hive's key
_FORM = re.compile(r"[A-Za-z0-9._~-]{16,256}")  # only characters that need no escaping in a header or a path


class NamedKey(BaseModel):
    """A client key with its limits; 0 means no limit.

    The limits are on the total open episodes and waiting claims of the key's clients, and on the seconds that one of
    their episodes may be idle. The log, fair shares and refusals use the name under which the key is listed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str = Field(repr=False)
    open_max: int = Field(default=0, ge=0, le=1_000_000)
    waiting_max: int = Field(default=0, ge=0, le=1_000_000)
    idle_max_s: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)


_NAMED_KEYS = TypeAdapter(dict[str, NamedKey])


@dataclass(frozen=True)
class HiveKeys:
    """The keys of a hive. An empty string means that a key is not set. Raises `Refused(BAD_CONFIG)` for a key that
    cannot be used.

    `clients` maps names to client keys; the key `client` has no name.
    """

    admin: str = field(default="", repr=False)
    client: str = field(default="", repr=False)
    clients: Mapping[str, NamedKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_names()
        named = [(f"client {name!r}", each.key) for name, each in self.clients.items()]
        for name, key in (("admin", self.admin), ("client", self.client), *named):
            if (key or name not in ("admin", "client")) and not _FORM.fullmatch(key):
                raise Refused(
                    Code.BAD_CONFIG,
                    f"The {name} key cannot be used: it needs 16 to 256 characters from A-Z a-z 0-9 . _ ~ - "
                    '(python -c "import secrets; print(secrets.token_urlsafe())" makes one).',
                )
        if self.admin and self.admin == self.client:
            raise Refused(
                Code.BAD_CONFIG, "The admin key and the client key are the same: every client would be an admin."
            )
        keys = [key for key in (self.admin, self.client, *(each.key for each in self.clients.values())) if key]
        if len(set(keys)) < len(keys):
            raise Refused(Code.BAD_CONFIG, "Two of the hive's keys are the same: give each client its own key.")

    def _check_names(self) -> None:
        if len(self.clients) > NAMED_KEYS_MAX:
            raise Refused(
                Code.BAD_CONFIG, f"There are {len(self.clients)} client keys, but at most {NAMED_KEYS_MAX} are allowed."
            )
        for name in self.clients:
            try:
                check_name(name, "client key")
            except ValueError as error:
                raise Refused(Code.BAD_CONFIG, f"{error}.") from None

    @property
    def for_clients(self) -> bool:
        """Whether clients need a key."""
        return bool(self.client or self.clients)

    def environment(self) -> dict[str, str]:
        """Return the variables that give a gateway process the same keys."""
        named = _NAMED_KEYS.dump_json(dict(self.clients)).decode() if self.clients else ""
        return {ADMIN_VARIABLE: self.admin, CLIENT_VARIABLE: self.client, CLIENTS_VARIABLE: named}


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for keys. Each option takes a file name instead of a key, because every process on the machine
    can read a command line."""
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key for configuring, starting and stopping engines (default: ${ADMIN_VARIABLE})",
    )
    parser.add_argument(
        "--client-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key for claiming episodes (default: ${CLIENT_VARIABLE})",
    )
    parser.add_argument(
        "--client-keys-file",
        type=Path,
        metavar="FILE",
        help="a JSON file of client keys by name, with limits for each: "
        f'{{"alice": {{"key": "...", "open_max": 64, "waiting_max": 16}}}} (default: ${CLIENTS_VARIABLE})',
    )
    parser.add_argument(
        "--trusted-network",
        action="store_true",
        help="listen beyond loopback without keys: everyone who can reach the port may control the hive",
    )


def keys_for(
    arguments: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    needed: Collection[str] = ("admin", "client"),
) -> HiveKeys:
    """Return the keys that these arguments and the environment name.

    Raises `Refused(BAD_CONFIG)` if a server that needs the `needed` ones beyond loopback may not listen at
    `arguments.host` with these keys, or if a key is unusable.
    """
    keys = HiveKeys(
        admin=_key("admin", arguments.admin_key_file, ADMIN_VARIABLE, environment),
        client=_key("client", arguments.client_key_file, CLIENT_VARIABLE, environment),
        clients=_named(_key("client", arguments.client_keys_file, CLIENTS_VARIABLE, environment)),
    )
    is_set = {"admin": bool(keys.admin), "client": keys.for_clients}
    missing = [f"--{name}-key-file" for name in needed if not is_set[name]]
    if missing and not arguments.trusted_network and not _is_loopback(arguments.host):
        raise Refused(
            Code.BAD_CONFIG,
            f"Listening at {arguments.host or 'every address'} exposes the hive to the network: pass "
            f"{' and '.join(missing)}, or --trusted-network if everyone who can reach this port may control the "
            "hive.",
        )
    return keys


def _key(name: str, path: Path | None, variable: str, environment: Mapping[str, str]) -> str:
    in_environment = environment.get(variable, "").strip()
    if path is None:
        return in_environment
    try:
        key = path.read_bytes().decode("ascii", "replace").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"The {name} key cannot be read from {path}: {error.strerror}.") from error
    if not key:
        raise Refused(Code.BAD_CONFIG, f"The {name} key file {path} is empty.")
    if in_environment and in_environment != key:
        raise Refused(Code.BAD_CONFIG, f"{path} and ${variable} hold different {name} keys: leave one of them out.")
    if mode & stat.S_IROTH:
        log.warning("every user of this machine may read the %s key: chmod o-r %s", name, path)
    return key


def _named(text: str) -> dict[str, NamedKey]:
    """Return client keys by name, from JSON. Error messages show none of the text, because it contains keys."""
    try:
        return _NAMED_KEYS.validate_json(text) if text else {}
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(
            Code.BAD_CONFIG,
            f"The client keys cannot be read ({where + ': ' if where else ''}{first['msg']}): they must be JSON, like "
            '{"alice": {"key": "...", "open_max": 64, "waiting_max": 16}}.',
        ) from None


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are on this machine. Raises `Refused` if the host has no address."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"Cannot listen at {host}: {error.strerror}.") from error
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the keys in a request's headers."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(key.strip())
    return [*found, *(key.removeprefix(SDK_PREFIX) for key in found if key.startswith(SDK_PREFIX))]


def matching(sent: Sequence[bytes], among: Mapping[bytes, T]) -> T | None:
    """Return the value of the first key that is among those sent, or None. It takes the same time for wrong keys."""
    found = (value for key, value in among.items() for each in sent if hmac.compare_digest(each, key))
    return next(found, None)
