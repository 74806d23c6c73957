"""The address of a bus, which no command line may hold when a password is in it: every user can read command lines."""

import re
from collections.abc import Mapping

VARIABLE = "BOMBUS_NATS"
_LOGIN = re.compile(r"(^|//|,)[^@/,]*@")


def has_login(url: str) -> bool:
    """Return whether a URL, or one of several with commas between, names a user, a password or a token."""
    return _LOGIN.search(url) is not None


def without_login(url: str) -> str:
    return _LOGIN.sub(r"\1", url)


def bus_arguments(url: str) -> tuple[str, ...]:
    """Return the arguments of a service that say where its bus is; none when only `bus_environment` may say it."""
    return () if has_login(url) else ("--nats", url)


def bus_environment(url: str) -> Mapping[str, str]:
    """Return the variable by which a service finds its bus without arguments."""
    return {VARIABLE: url}
