"""Checks requests before they can take a slot: path, key, host name, and the origin of web pages."""

import hmac
import json
from http import HTTPStatus
from urllib.parse import SplitResult, parse_qs, urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from bombus.environments.serving.settings import WAIT_S_MAX
from bombus.errors import Code
from bombus.machine.host_names import OwnHostNames

PAGE_MAY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class NotLetIn(Exception):
    """Raised for a request that was turned away. It carries the HTTP status and the reason with which the request is
    answered."""

    def __init__(self, status: HTTPStatus, code: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code

    def response(self) -> Response:
        return json_response(self.status, {"detail": str(self), "code": self.code})


def json_response(status: HTTPStatus, found: object) -> Response:
    return response(status, "application/json", json.dumps(found).encode())


def response(status: HTTPStatus, kind: str, body: bytes) -> Response:
    headers = Headers({"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"})
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Content-Security-Policy"] = PAGE_MAY
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    return Response(status.value, status.phrase, headers, body)


def check_caller(request: Request, key: str, names: OwnHostNames) -> None:
    """Raise `NotLetIn` for a request that lacks the key, uses a foreign host name, or comes from another site's
    page."""
    headers = request.headers
    host, origin = _only(headers, "Host") or "", _only(headers, "Origin")
    if key:
        given = (_only(headers, "Authorization") or "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), key.encode()):
            why = "this server needs its key, in the header `Authorization: Bearer KEY`"
            raise NotLetIn(HTTPStatus.UNAUTHORIZED, Code.BAD_KEY, why)
    if not key and host and not names.include(host):
        why = f"{host[:200]!r} is not a name of this server: if it should be, start the server with --host-name"
        raise NotLetIn(HTTPStatus.MISDIRECTED_REQUEST, Code.UNKNOWN_HOST, why)
    if origin is not None and (not host or origin.partition("://")[2] != host):  # only browsers send an origin
        raise NotLetIn(HTTPStatus.FORBIDDEN, Code.UNKNOWN_HOST, "web pages of other sites may not use this server")


def _only(headers: Headers, name: str) -> str | None:
    """Return the value of a header, or None if it is missing. Raises `NotLetIn` if the header occurs more than once."""
    given = headers.get_all(name)
    if len(given) > 1:
        raise NotLetIn(HTTPStatus.BAD_REQUEST, Code.MALFORMED, f"the request has {len(given)} {name} headers: send one")
    return given[0] if given else None


def url_of(request: Request) -> SplitResult:
    """Return the parsed URL of a request. Raises `NotLetIn`."""
    try:
        url: SplitResult = urlsplit(request.path)
    except ValueError as error:
        why = f"{request.path[:200]!r} is not the path of a URL: {error}"
        raise NotLetIn(HTTPStatus.BAD_REQUEST, Code.MALFORMED, why) from error
    return url


def session_of(query: str) -> str | None:
    """Return the session that a client wants to join (`?session_id=`), or None if it wants a new one."""
    return parse_qs(query).get("session_id", [None])[-1]


def wait_s_of(query: str) -> float:
    """Return how long a client wants to wait for a slot (`?wait_s=`). Raises `NotLetIn` if the value is not allowed."""
    text = parse_qs(query).get("wait_s", ["0"])[-1]
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= WAIT_S_MAX:
        why = f"wait_s is {text[:40]!r}: it must be a number of seconds from 0 to {WAIT_S_MAX:.0f}"
        raise NotLetIn(HTTPStatus.BAD_REQUEST, Code.MALFORMED, why)
    return wait_s
