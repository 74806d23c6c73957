"""Limits a gateway's open requests and the memory for their bodies, with a fair share of both for each key."""

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Message, Receive

from bombus.errors import Code, Refused
from bombus.hive.shares import has_share
from bombus.machine.host_names import RawHeaders
from bombus.machine.http_server import connections_max
from bombus_gateway.access import episode_key
from bombus_gateway.context import Gateway
from bombus_gateway.settings import GatewaySettings

CONNECTIONS_FOR_A_CALL = 2  # clients keep some connections open without a call


def connections_of(settings: GatewaySettings) -> int:
    """Return how many connections a gateway may have."""
    return connections_max(CONNECTIONS_FOR_A_CALL * settings.open_calls_max)


def places_of(settings: GatewaySettings) -> int:
    """Return how many requests may be open before each key is held to its share. A quarter of the connections is kept
    spare.

    Calls have a separate limit, which must be reached first. The result is therefore above that limit, if this process
    may open enough files for so many.
    """
    connections = connections_of(settings)
    return max(min(settings.open_calls_max, connections // CONNECTIONS_FOR_A_CALL) + 1, connections * 3 // 4)


class OpenRequest:
    """One open request: how many bytes of its body have been received and, once known, the share against which it
    counts."""

    __slots__ = ("bytes", "headers", "share")

    def __init__(self, headers: RawHeaders) -> None:
        self.headers = headers
        self.bytes = 0
        self.share: str | None = None


class OpenRequests:
    """Counts requests, and the bytes of their bodies, until the requests are answered.

    `share_of` returns the name of the share that a request counts against, given the request's headers. It is called
    only when places or memory have run out.
    """

    def __init__(self, places: int, bytes_max: int, share_of: Callable[[RawHeaders], str]) -> None:
        self._places = places
        self._bytes_max = bytes_max
        self._share_of = share_of
        self._open = 0
        self._held = 0  # bytes of bodies
        self._unknown: set[OpenRequest] = set()
        self._open_of: Counter[str] = Counter()  # counts only requests whose share is known
        self._held_by: Counter[str] = Counter()

    def enter(self, headers: RawHeaders) -> OpenRequest:
        """Count a request until `leave` is called. Raises `Refused` OVERLOADED if there is no room for it."""
        request = OpenRequest(headers)
        if self._open < self._places:
            self._unknown.add(request)
        else:
            self._look_up()
            request.share = self._share_of(headers)
            if not has_share(self._open_of, request.share, self._places):
                why = f"{self._open} requests are open here, but the limit is {self._places}; try again in a moment."
                raise Refused(Code.OVERLOADED, why)
            self._open_of[request.share] += 1
        self._open += 1
        return request

    def leave(self, request: OpenRequest) -> None:
        self._open -= 1
        self._held -= request.bytes
        if request.share is None:
            self._unknown.remove(request)
        else:
            self._open_of[request.share] -= 1
            self._held_by[request.share] -= request.bytes

    async def received(self, request: OpenRequest, receive: Receive) -> Message:
        """Receive and count part of a request's body. Raises `Refused` OVERLOADED if there is no memory for it."""
        message = await receive()
        size = len(message.get("body", b""))
        if size and self._held + size > self._bytes_max:
            self._look_up()
            if not has_share(self._held_by, request.share or "", self._bytes_max, size):
                why = f"The requests in progress fill the limit of {self._bytes_max >> 20} MiB; try again in a moment."
                raise Refused(Code.OVERLOADED, why)
        self._held += size
        request.bytes += size
        if request.share is not None:
            self._held_by[request.share] += size
        return message

    def _look_up(self) -> None:
        """Find the shares that the open requests count against."""
        for request in self._unknown:
            request.share = self._share_of(request.headers)
            self._open_of[request.share] += 1
            self._held_by[request.share] += request.bytes
        self._unknown.clear()


def share_by_key(gateway: Gateway) -> Callable[[RawHeaders], str]:
    """Return a function that maps a request's headers to a share: that of the request's key, or that of the key that
    claimed the request's episode."""
    return lambda headers: gateway.clients.holder(headers).share or _owner_of_episode(gateway, headers)


def _owner_of_episode(gateway: Gateway, headers: RawHeaders) -> str:
    """Return the name of the key that claimed a request's open episode, or "" if there is none."""
    try:
        claims = gateway.keys.verify(episode_key(dict(headers)), time.time_ns())
    except Refused:
        return ""
    episode = gateway.follower.hive.engine(claims.engine).open.get(claims.episode)
    return "" if episode is None else episode.owner
