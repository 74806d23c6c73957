"""The address of a bus, and the users who log in there.

An address with a password must not be on a command line, which every user can read.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from urllib.parse import urlsplit

from bombus.errors import Code, Refused

VARIABLE = "BOMBUS_NATS"
_LOGIN = re.compile(r"(^|//|,)[^/,]*@")


class BusUser(StrEnum):
    """The users of a bus, by the services that log in as them. `observer` is for commands that only look, and for the
    page; `operator` may do everything within the hive."""

    OPERATOR = "operator"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    TRAINER = "trainer"
    INFERENCE = "inference"
    ENVIRONMENT = "environment"
    OBSERVER = "observer"


def has_login(url: str) -> bool:
    """Return whether a URL, or any of several separated by commas, has a user, a password or a token."""
    return _LOGIN.search(url) is not None


def without_login(url: str) -> str:
    return _LOGIN.sub(r"\1", url)


def check_bus_address(url: str) -> None:
    """Raise `Refused` unless the text is the URL of a bus, or several URLs separated by commas.

    The error does not quote the text: if it cannot be parsed, any part of it may be a password.
    """
    for each in url.split(","):
        try:
            parts = urlsplit(each if "//" in each else f"//{each}")
            is_read = bool(parts.hostname and parts.port != 0) and "@" not in parts.path + parts.query + parts.fragment
        except ValueError:
            is_read = False
        if not is_read:
            raise Refused(
                Code.BAD_CONFIG,
                "the address of the bus cannot be read: it must be nats://HOST:PORT or nats://USER:PASSWORD@HOST:PORT, "
                "or several separated by commas; a user or password cannot contain a slash, comma, question mark or "
                "hash",
            )


def bus_arguments(url: str) -> tuple[str, ...]:
    """Return a service's arguments for the bus address, or none if the address has a login, in which case
    `bus_environment` passes it on."""
    return () if has_login(url) else ("--nats", url)


def bus_environment(url: str) -> Mapping[str, str]:
    """Return the environment variable that passes the bus address to a service."""
    return {VARIABLE: url}


def user_name(hive: str, user: BusUser, generation: int) -> str:
    """Return the name of a login. While a password is replaced, two generations are valid."""
    return f"{hive}.{user}.{generation}"


def user_of(url: str, hive: str) -> BusUser | None:
    """Return the user whose login an address contains, or None if `bombus init` did not make it."""
    first = url.split(",")[0]
    name = urlsplit(first if "//" in first else f"//{first}").username or ""
    parts = name.split(".")
    return BusUser(parts[1]) if len(parts) == 3 and parts[0] == hive and parts[1] in list(BusUser) else None
