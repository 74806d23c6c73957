"""Who may see the page. It shows every prompt of the hive, so a hive with an admin key shows it to its holder alone."""

import hmac
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bombus.errors import STATUS, Code
from bombus.insight.web.pages import render
from bombus.machine.hive_keys import HiveKeys, KeyRing, matching, presented
from bombus.machine.host_names import AsgiApp, AsgiReceive, AsgiSend, OwnHostsOnly, foreign_page

PATH_KEY = "/k/"
FORM_PATH = "/key"
FORM_BYTES_MAX = 4096
COOKIE_S = 30 * 86_400


def guarded(app: AsgiApp, ring: KeyRing, bound: socket.socket, names: Iterable[str] = ()) -> AsgiApp:
    """Let only those use an application, served on a bound socket, who have the admin key or, if there is none, a
    client key. Without keys, only requests for this server's own names pass, and none of other sites' pages."""
    guard = _Guard(app, ring, int(bound.getsockname()[1]))
    return guard if opening(ring.keys) else OwnHostsOnly(guard, bound, names)


def opening(keys: HiveKeys) -> list[str]:
    """Return the keys that open the page."""
    named = [key for each in keys.clients.values() for key in (each.key, each.before) if key]
    return [*keys.admins] if keys.admin else [*keys.unnamed, *named]


class _Guard:
    """A browser sends the key once, in a form or as `/k/KEY`, and gets a cookie that is derived from it. Programs send
    the key as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: AsgiApp, ring: KeyRing, port: int) -> None:
        self._app = app
        self._ring = ring
        self._cookie = f"bombus-web-{port}"  # browsers do not keep the cookies of ports apart
        self._read()

    def _read(self) -> None:
        """Take over the keys that are valid now. The cookies of those that are not become void."""
        self._keys = self._ring.keys
        keys = [key.encode() for key in opening(self._keys)]
        self._tokens = {key: hmac.digest(key, b"bombus web", "sha256").hex() for key in keys}
        self._known = {token.encode(): token for token in self._tokens.values()}

    async def __call__(self, scope: Any, receive: AsgiReceive, send: AsgiSend) -> None:
        await (await self._answer(Request(scope, receive)) or self._app)(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """Return the answer to a request that does not reach the application."""
        if self._keys is not self._ring.keys:
            self._read()
        headers, path = request.scope["headers"], request.url.path
        if not self._tokens:
            foreign = foreign_page(headers)
            return _refused("A web page from another site may not use this page.") if foreign else None
        if path.startswith(PATH_KEY):
            key, _, rest = path.removeprefix(PATH_KEY).partition("/")
            return self._admit(key, f"/{rest.lstrip('/')}{'?' if request.url.query else ''}{request.url.query}")
        if path == FORM_PATH and request.method == "POST":
            length = request.headers.get("content-length", "")
            is_form = len(length) < 5 and length.isdecimal() and int(length) <= FORM_BYTES_MAX
            body = await request.body() if is_form else b""
            return self._admit(parse_qs(body.decode("latin-1")).get("key", [""])[0], "/")
        cookie = request.cookies.get(self._cookie, "").encode()
        if matching(presented(headers), self._tokens) or matching([cookie], self._known):
            return None
        return _refused("This page shows what agents and models say: it needs the hive's key.")

    def _admit(self, key: str, to: str) -> Response:
        token = matching([key.encode()], self._tokens)
        if token is None:
            return _refused("That key does not open this page.")
        answer = RedirectResponse(to, 303)
        answer.set_cookie(self._cookie, token, max_age=COOKIE_S, httponly=True, samesite="strict")
        return answer


def _refused(why: str) -> Response:
    return Response(render("key.html", why=why, path=FORM_PATH), STATUS[Code.BAD_KEY], media_type="text/html")
