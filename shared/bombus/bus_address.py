"""The address of a bus, which no command line may hold when a password is in it: every user can read command lines."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from bombus.errors import Code, Refused

VARIABLE = "BOMBUS_NATS"
_LOGIN = re.compile(r"(^|//|,)[^/,]*@")


def has_login(url: str) -> bool:
    """Return whether a URL, or one of several with commas between, names a user, a password or a token."""
    return _LOGIN.search(url) is not None


def without_login(url: str) -> str:
    return _LOGIN.sub(r"\1", url)


def check_bus_address(url: str) -> None:
    """Raise `Refused` for what is not the URL of a bus, or several with commas between.

    The error does not repeat it: in a URL that cannot be read, nobody can tell which part is a password.
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
                "the address of the bus cannot be read: it is nats://HOST:PORT or nats://USER:PASSWORD@HOST:PORT, or "
                "several separated by commas; a user or password cannot contain a slash, comma, question mark or hash",
            )


def bus_arguments(url: str) -> tuple[str, ...]:
    """Return the arguments of a service that say where its bus is; none when only `bus_environment` may say it."""
    return () if has_login(url) else ("--nats", url)


def bus_environment(url: str) -> Mapping[str, str]:
    """Return the variable by which a service finds its bus without arguments."""
    return {VARIABLE: url}
