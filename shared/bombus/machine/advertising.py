"""The address at which a service tells others to reach it."""

import socket
from urllib.parse import urlsplit

from bombus.machine.certificates import scheme
from bombus.machine.host_names import address_of


def url_of(bound: socket.socket) -> str:
    """Return the URL of a server on a bound socket, using the address at which the server listens."""
    host, port = bound.getsockname()[:2]
    return f"{scheme()}://{_netloc(host, port)}"


def url_for_others(url: str, own: str) -> str:
    """Return `url` with `own` in place of a host that means every address of a machine, such as 0.0.0.0.

    `own` is the machine's name, or the address from which it reaches others. Returns "" if others cannot reach the
    machine at `own`, either because `own` is a loopback or link-local address, or because it is an IPv6 address while
    the service listens only on IPv4.
    """
    parts = urlsplit(url)
    listens_at, mine = address_of(parts.hostname or ""), address_of(own)
    if listens_at is None or not listens_at.is_unspecified:
        return url
    if mine is not None and (mine.is_loopback or mine.is_link_local or mine.version > listens_at.version):
        return ""
    return parts._replace(netloc=_netloc(own, parts.port)).geturl()


def _netloc(host: str, port: int | None) -> str:
    where = f"[{host}]" if ":" in host else host
    return where if port is None else f"{where}:{port}"
