"""The HTTP transport of both clients, between `ServerRequest` and `ServerReply` on one side and httpx on the other."""

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import httpx

from bombus import telemetry
from bombus.machine.certificates import certificates
from bombus.machine.hive_keys import ADMIN_VARIABLE, CLIENT_VARIABLE
from bombus.machine.host_names import is_loopback
from bombus.sdk.requests import NoReply, ServerReply, ServerRequest

CONNECTIONS_MAX = 512
POOL_CONNECTIONS = 16
CONNECT_S = 10.0

Http = TypeVar("Http", bound=httpx.Client | httpx.AsyncClient)
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


def address(server_url: str, api_key: str | None, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the hive's URL and the key to use with it, or "" as the key if there is none.

    A key in the path is removed from the URL, because URLs appear in logs, in errors and in the base URLs of agents.
    """
    url, mark, in_path = server_url.rstrip("/").partition("/k/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"server_url {url!r} must begin with http:// or https://")
    if url.endswith("/v1"):
        raise ValueError(f"server_url {url!r} is an agent's address: the hive's own is {url.removesuffix('/v1')}")
    if "/" in in_path:
        raise ValueError(f"server_url {url + mark + '...'!r} must end with its key; pass the engine separately")
    if api_key is None:
        of_hive = environment.get(ADMIN_VARIABLE) or environment.get(CLIENT_VARIABLE, "")
        api_key = in_path or of_hive.partition(",")[0]  # after a comma is the key that it replaces
    key = api_key.strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError("the hive's key contains characters that no header can carry: use printable ASCII")
    return url, key


def client_options(server_url: str, engine: str | None, key: str) -> dict[str, Any]:
    """Return the httpx options. `engine` selects that engine's routes; the default is the hive's first engine."""
    limits = httpx.Limits(max_connections=POOL_CONNECTIONS, max_keepalive_connections=POOL_CONNECTIONS)
    base_url = f"{server_url}/e/{engine}" if engine else server_url
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # A proxy from the environment cannot reach this machine's loopback address.
    trusts_environment = not is_loopback(httpx.URL(server_url).host)
    return {
        "base_url": base_url,
        "limits": limits,
        "headers": headers,
        "trust_env": trusts_environment,
        "verify": certificates(trusts_environment),
    }


class HttpPools(Generic[Http]):
    """As many httpx clients as a client of a hive needs, for up to `POOL_CONNECTIONS` requests at a time each.

    httpx looks at all connections of a client and at all requests that wait for one whenever a request begins or ends:
    with 500 of them that takes some 10 ms.
    """

    def __init__(self, make: Callable[[], Http]) -> None:
        self._make = make
        self.made = [make()]
        self._used = [0]
        self._lock = threading.Lock()

    @contextmanager
    def client(self) -> Iterator[Http]:
        """Yield an httpx client for one request."""
        with self._lock:
            at = next((at for at, used in enumerate(self._used) if used < POOL_CONNECTIONS), len(self.made))
            if at == len(self.made):
                self.made.append(self._make())
                self._used.append(0)
            self._used[at] += 1
        try:
            yield self.made[at]
        finally:
            with self._lock:
                self._used[at] -= 1


class OpenConnections:
    """The connections of a client.

    They can be shut down when the client is interrupted, so that no thread keeps waiting for a reply.
    """

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Record a new connection. httpx calls this at each step of a request (its `trace` extension)."""
        if event in _CONNECTED:
            with self._lock:
                self._sockets.add(facts["return_value"].get_extra_info("socket"))

    def end(self) -> None:
        """Shut down all connections. Later requests open new ones."""
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):  # the connection has already ended
                    each.shutdown(socket.SHUT_RDWR)


def request_options(request: ServerRequest) -> dict[str, Any]:
    headers = dict(request.headers)
    if traceparent := telemetry.current():
        headers[telemetry.HEADER] = traceparent
    return {
        "method": request.method,
        "url": request.path,
        "content": request.body,
        "headers": headers,
        "timeout": httpx.Timeout(request.timeout_s, connect=min(CONNECT_S, request.timeout_s)),
    }


def no_reply(base_url: httpx.URL, error: httpx.RequestError) -> NoReply:
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return NoReply(f"no answer from {base_url} ({why})")


def reply_of(response: httpx.Response) -> ServerReply:
    try:
        retry_after_s = float(response.headers.get("retry-after", 0))
    except ValueError:
        retry_after_s = 0.0  # the header was a date, which our own server never sends
    retry_after_s = max(0.0, min(retry_after_s, 60.0))
    return ServerReply(
        status=response.status_code, body=response.content, url=str(response.url), retry_after_s=retry_after_s
    )


def sent(http: httpx.Client, request: ServerRequest, extensions: dict[str, Any] | None = None) -> ServerReply | NoReply:
    """Send a request, and block until there is a reply or an error."""
    try:
        return reply_of(http.request(**request_options(request), extensions=extensions))
    except httpx.RequestError as error:
        return no_reply(http.base_url, error)
