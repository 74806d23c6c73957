"""Refuses requests whose `Host` is not a name of this server.

A route without a key trusts the machine or the network. However, a browser on that machine or network also runs
untrusted pages, and an attacker can point a domain at this server (DNS rebinding): the browser then treats this server
as the attacker's, and lets the page read its answers. In such a request, `Host` is the attacker's domain.
"""

import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from bombus.errors import STATUS, Code

AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

HeaderPair = tuple[bytes, bytes]
RawHeaders = Iterable[HeaderPair]  # as passed by ASGI
FOREIGN_SITES = ("cross-site", "same-site")  # values of Sec-Fetch-Site, a header that browsers send
ACCEPTED_KEPT = 256  # how many values of `Host` are remembered; values differ in their ports


class OwnHostNames:
    """The names that a server accepts: those of loopback, the address at which it listens, and `names`.

    A server that listens on every address accepts any IP address, since an attacker controls names, not addresses.
    """

    def __init__(self, listens_at: str, names: Iterable[str] = ()) -> None:
        self._names = {name.lower() for name in ("localhost", listens_at, *names) if name}
        own = address_of(listens_at)
        self._everywhere = listens_at == "" or (own is not None and own.is_unspecified)

    def include(self, host: str) -> bool:
        """Return whether a value of `Host`, with or without a port, names this server."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        address = address_of(name)
        return name in self._names or (address is not None and (self._everywhere or address.is_loopback))


class OwnHostsOnly:
    """ASGI middleware that passes on requests meant for this server, and answers all others with 421.

    A request without `Host` is passed on: browsers always send one.
    """

    def __init__(self, app: AsgiApp, bound: socket.socket, names: Iterable[str]) -> None:
        self._app = app
        own = OwnHostNames(str(bound.getsockname()[0]), names)
        self._is_own = lru_cache(ACCEPTED_KEPT)(lambda host: own.include(host.decode("latin-1")))

    async def __call__(self, scope: Any, receive: AsgiReceive, send: AsgiSend) -> None:
        for name, value in scope["headers"] if scope["type"] == "http" else ():
            if name == b"host" and not self._is_own(value):
                await _refuse(value.decode("latin-1"), send)
                return
        await self._app(scope, receive, send)


def host_of(url: str) -> str:
    """Return the host in a URL, or "" if it has none."""
    return urlsplit(url).hostname or ""


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, judging by its name alone."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host's name as an IP address, or None if it is not an IP address."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def foreign_page(headers: RawHeaders, public_url: str = "", changing_get: bool = False) -> str:
    """Return which web page of another site has made a request, in words, or "" for any other request.

    A route that needs no key trusts its machine or network. But browsers there also run other sites' pages, which can
    post to this route, or point a domain name of their own at it. Browsers send the page's site in `Origin`, which
    other clients do not send. For images and links, browsers omit `Origin`. If the server is on the browser's own
    machine, the browser says in `Sec-Fetch-Site` that the page is from another site, and names the page in `Referer`.
    The other site cannot read a page that is opened through a link, so links to routes that change nothing are allowed.
    """
    named = {name: value.decode("latin-1") for name, value in headers}
    origin = named.get(b"origin", "")
    if not origin and changing_get:
        origin = _origin_of(named.get(b"referer", ""))
    if origin:
        is_foreign = origin != public_url and not _is_own_page(origin, named.get(b"host", ""))
        return f"A web page from {origin[:200]!r}" if is_foreign else ""
    is_link = named.get(b"sec-fetch-mode", "") == "navigate" and not changing_get
    is_foreign = named.get(b"sec-fetch-site", "") in FOREIGN_SITES and not is_link
    return "A web page from another site" if is_foreign else ""


def _origin_of(page: str) -> str:
    """Return the origin in a page's address, or "" for an empty address."""
    scheme, _, rest = page.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if page else ""


def _is_own_page(origin: str, host: str) -> bool:
    """Return whether a page's origin is the host to which its request went. A domain name never counts, as it could be
    rebound."""
    try:
        page = urlsplit(origin)
        if page.hostname != "localhost":
            ipaddress.ip_address(page.hostname or "")
    except ValueError:
        return False
    return page.netloc == host


async def _refuse(host: str, send: AsgiSend) -> None:
    why = (
        f"{host[:200]!r} is not a name of this server, which answers only to its own names. If it should be, start the "
        "server with it as --host-name."
    )
    body = json.dumps({"detail": why, "code": Code.UNKNOWN_HOST}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": STATUS[Code.UNKNOWN_HOST], "headers": headers})
    await send({"type": "http.response.body", "body": body})
