"""Reads the hive's own keys (the admin key and the clients' keys), and refuses to expose a gateway without them.

Each key may have one that it replaces and that is valid too, so that keys can be replaced while clients still use them.
Files of keys are read again when they change.

Episodes have separate keys, which gateways sign and agents use.
"""

import argparse
import asyncio
import hmac
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
GENERATIONS = 2  # a key, and the one that it replaces
LOOK_AGAIN_S = 2.0  # how often files of keys are looked at
T = TypeVar("T")
SDK_PREFIX = b"tml-"  # Tinker's client requires this prefix, so it may be put before a hive's key
_FORM = re.compile(r"[A-Za-z0-9._~-]{16,256}")  # only characters that need no escaping in a header or a path


class NamedKey(BaseModel):
    """A client key with its limits; 0 means no limit. `before` is the key that it replaces, or "".

    The limits are on the total open episodes and waiting claims of the key's clients, and on the seconds that one of
    their episodes may be idle; at each gateway, also on their model calls a second and at a time, and on the tokens
    and the bytes of these in a minute. The log, fair shares and refusals use the name under which the key is listed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str = Field(repr=False)
    before: str = Field(default="", repr=False)
    open_max: int = Field(default=0, ge=0, le=1_000_000)
    waiting_max: int = Field(default=0, ge=0, le=1_000_000)
    idle_max_s: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)
    calls_per_s_max: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False)
    calls_open_max: int = Field(default=0, ge=0, le=1_000_000)
    tokens_per_minute_max: int = Field(default=0, ge=0, le=10**12)
    bytes_per_minute_max: int = Field(default=0, ge=0, le=10**15)

    @property
    def limits_calls(self) -> bool:
        """Whether the key has a limit on its model calls."""
        return bool(
            self.calls_per_s_max or self.calls_open_max or self.tokens_per_minute_max or self.bytes_per_minute_max
        )


_NAMED_KEYS = TypeAdapter(dict[str, NamedKey])


@dataclass(frozen=True)
class KeyFiles:
    """The files that keys came from."""

    admin: Path | None = None
    client: Path | None = None
    clients: Path | None = None

    def arguments(self) -> list[str]:
        """Return the command line that gives another process the same files."""
        flags = {"--admin-key-file": self.admin, "--client-key-file": self.client, "--client-keys-file": self.clients}
        return [word for flag, path in flags.items() if path is not None for word in (flag, str(path.absolute()))]

    def stamps(self) -> list[tuple[int, int, int] | None]:
        """Return what changes when one of the files does."""
        return [_stamp(path) for path in (self.admin, self.client, self.clients) if path is not None]


@dataclass(frozen=True)
class HiveKeys:
    """The keys of a hive. An empty string means that a key is not set. Raises `Refused(BAD_CONFIG)` for a key that
    cannot be used.

    `clients` maps names to client keys; the key `client` has no name. The keys `before` are replaced by the others, and
    still valid.
    """

    admin: str = field(default="", repr=False)
    client: str = field(default="", repr=False)
    clients: Mapping[str, NamedKey] = field(default_factory=dict)
    admin_before: str = field(default="", repr=False)
    client_before: str = field(default="", repr=False)
    files: KeyFiles = field(default=KeyFiles(), compare=False)

    def __post_init__(self) -> None:
        self._check_names()
        named = [(f"client {name!r}", each.key) for name, each in self.clients.items()]
        before = [(f"client {name!r}", each.before) for name, each in self.clients.items() if each.before]
        own = [("admin", key) for key in self.admins] + [("client", key) for key in self.unnamed]
        for name, key in (*own, *named, *before):
            if not _FORM.fullmatch(key):
                raise Refused(
                    Code.BAD_CONFIG,
                    f"The {name} key cannot be used: it needs 16 to 256 characters from A-Z a-z 0-9 . _ ~ - "
                    '(python -c "import secrets; print(secrets.token_urlsafe())" makes one).',
                )
        if self.admin and self.admin == self.client:
            raise Refused(
                Code.BAD_CONFIG, "The admin key and the client key are the same: every client would be an admin."
            )
        keys = [key for _, key in (*own, *named, *before)]
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
    def admins(self) -> tuple[str, ...]:
        """The admin keys that are valid."""
        return tuple(key for key in (self.admin, self.admin_before) if key)

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The client keys without a name that are valid."""
        return tuple(key for key in (self.client, self.client_before) if key)

    @property
    def for_clients(self) -> bool:
        """Whether clients need a key."""
        return bool(self.client or self.clients)

    def environment(self) -> dict[str, str]:
        """Return the variables that give a gateway process those keys that it cannot read from `files`."""
        named = _NAMED_KEYS.dump_json(dict(self.clients)).decode() if self.clients else ""
        return {
            ADMIN_VARIABLE: "" if self.files.admin else ",".join(self.admins),
            CLIENT_VARIABLE: "" if self.files.client else ",".join(self.unnamed),
            CLIENTS_VARIABLE: "" if self.files.clients else named,
        }

    def read_again(self) -> "HiveKeys":
        """Return the keys as their files have them now. Raises `Refused(BAD_CONFIG)`, also if they would no longer be
        needed where they are needed now, or the other way round: a gateway finds out only when it starts."""
        files, found = self.files, self
        if files.admin:
            admin, before = _two("admin", _text("admin", files.admin).splitlines())
            found = replace(found, admin=admin, admin_before=before)
        if files.client:
            client, before = _two("client", _text("client", files.client).splitlines())
            found = replace(found, client=client, client_before=before)
        if files.clients:
            found = replace(found, clients=_named(_text("client", files.clients)))
        if found.for_clients != self.for_clients:
            raise Refused(Code.BAD_CONFIG, "Whether clients need a key changes only with a restart.")
        return found


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, keys: HiveKeys) -> None:
        self.keys = keys

    async def follow(self) -> None:
        """Read the files of keys again whenever they change, until cancelled. Keys that cannot be used change
        nothing."""
        seen: list[tuple[int, int, int] | None] = []  # they may have changed since this process started
        while True:
            stamps = self.keys.files.stamps()  # before the files are read, so that no change is missed
            if stamps != seen:
                seen = stamps
                self.read_again()
            await asyncio.sleep(LOOK_AGAIN_S)

    def read_again(self) -> None:
        try:
            found = self.keys.read_again()
        except Refused as refusal:
            log.error("the keys stay as they were: %s", refusal)
            return
        if found != self.keys:
            self.keys = found
            log.info("the keys have been replaced", extra={"client_keys": sorted(found.clients)})


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for keys. Each option takes a file name instead of a key, because every process on the machine
    can read a command line."""
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="holds the key for configuring, starting and stopping engines and, in a second line, the one that it "
        f"replaces; it is read again when it changes (default: ${ADMIN_VARIABLE})",
    )
    parser.add_argument(
        "--client-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key for claiming episodes, in the same way (default: ${CLIENT_VARIABLE})",
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
    files = KeyFiles(arguments.admin_key_file, arguments.client_key_file, arguments.client_keys_file)
    admin, admin_before = _keys("admin", files.admin, ADMIN_VARIABLE, environment)
    client, client_before = _keys("client", files.client, CLIENT_VARIABLE, environment)
    clients = _given("client", files.clients, CLIENTS_VARIABLE, environment)
    keys = HiveKeys(admin, client, _named(clients), admin_before, client_before, files)
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


def _keys(name: str, path: Path | None, variable: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return a key and the one that it replaces, which are two lines of a file, or have a comma between them."""
    given = _given(name, path, variable, environment)
    return _two(name, given.split(",") if path is None else given.splitlines()) if given else ("", "")


def _two(name: str, found: Sequence[str]) -> tuple[str, str]:
    if len(found) > GENERATIONS:
        raise Refused(
            Code.BAD_CONFIG,
            f"There are {len(found)} {name} keys, but there may be {GENERATIONS}: the key and the one it replaces.",
        )
    key, *before = (each.strip() for each in found)
    return key, "".join(before)


def _given(name: str, path: Path | None, variable: str, environment: Mapping[str, str]) -> str:
    in_environment = environment.get(variable, "").strip()
    if path is None:
        return in_environment
    text = _text(name, path)
    if in_environment and re.split(r"[,\s]+", in_environment) != re.split(r"[,\s]+", text):
        raise Refused(Code.BAD_CONFIG, f"{path} and ${variable} hold different {name} keys: leave one of them out.")
    return text


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _text(name: str, path: Path) -> str:
    """Return what a file of keys holds. Raises `Refused` if it cannot be read."""
    try:
        key = path.read_bytes().decode("ascii", "replace").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise Refused(Code.BAD_CONFIG, f"The {name} key cannot be read from {path}: {error.strerror}.") from error
    if not key:
        raise Refused(Code.BAD_CONFIG, f"The {name} key file {path} is empty.")
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
