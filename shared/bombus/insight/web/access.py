"""Who may see the page. It shows every prompt of the hive, so a hive with an admin key shows it to its holder alone."""

import hmac
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qs

from jinja2 import Template
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bombus.errors import STATUS, Code
from bombus.machine.hive_keys import HiveKeys
from bombus.machine.host_names import AsgiApp, AsgiReceive, AsgiSend, OwnHostsOnly

PATH_KEY = "/k/"
FORM_PATH = "/key"
FORM_BYTES_MAX = 4096
COOKIE_S = 30 * 86_400
FOREIGN_SITES = ("cross-site", "same-site")  # values of Sec-Fetch-Site, a header that browsers send

_FORM = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>bombus</title></head>
<body><main><h1>bombus</h1><form method="post" action="{{ path }}"><p>{{ why }}</p>
<p><label>Key <input type="password" name="key" autocomplete="current-password" required></label>
<button>Open</button></p>
</form></main></body></html>
""",
    autoescape=True,
)


def guarded(app: AsgiApp, keys: HiveKeys, bound: socket.socket, names: Iterable[str] = ()) -> AsgiApp:
    """Let only those use an application, served on a bound socket, who have the admin key or, if there is none, a
    client key. Without keys, only requests for this server's own names pass, and none of other sites' pages."""
    opening = [keys.admin] if keys.admin else [keys.client, *(each.key for each in keys.clients.values())]
    opening = [key for key in opening if key]
    if opening:
        return _KeyHoldersOnly(app, opening, int(bound.getsockname()[1]))
    return OwnHostsOnly(_own_pages_only(app), bound, names)


class _KeyHoldersOnly:
    """A browser sends the key once, in a form or as `/k/KEY`, and gets a cookie that is derived from it. Programs send
    the key as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: AsgiApp, opening: Sequence[str], port: int) -> None:
        self._app = app
        self._cookie = f"bombus-web-{port}"  # browsers do not keep the cookies of ports apart
        self._tokens = {key: hmac.digest(key.encode(), b"bombus web", "sha256").hex() for key in opening}

    async def __call__(self, scope: dict[str, object], receive: AsgiReceive, send: AsgiSend) -> None:
        request = Request(scope, receive)
        path = request.url.path
        if path.startswith(PATH_KEY):
            key, _, rest = path.removeprefix(PATH_KEY).partition("/")
            query = f"?{request.url.query}" if request.url.query else ""
            answer = self._admit(key, f"/{rest.lstrip('/')}{query}")
        elif path == FORM_PATH and request.method == "POST":
            answer = self._admit(await _posted(request), "/")
        elif self._is_known(request):
            await self._app(scope, receive, send)
            return
        else:
            answer = _refused("This page shows what agents and models say: it needs the hive's key.")
        await answer(scope, receive, send)

    def _is_known(self, request: Request) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        sent = [request.headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        cookie = request.cookies.get(self._cookie, "")
        return any(self._opens(key) for key in sent) or any(
            hmac.compare_digest(cookie.encode(), token.encode()) for token in self._tokens.values()
        )

    def _opens(self, key: str) -> bool:
        return any(hmac.compare_digest(key.encode(), own.encode()) for own in self._tokens)

    def _admit(self, key: str, to: str) -> Response:
        if not self._opens(key):
            return _refused("That key does not open this page.")
        answer = RedirectResponse(to, 303)
        answer.set_cookie(self._cookie, self._tokens[key], max_age=COOKIE_S, httponly=True, samesite="strict")
        return answer


async def _posted(request: Request) -> str:
    """Return the key in a form, or "" if there is none."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            return ""
    return parse_qs(body.decode("latin-1")).get("key", [""])[0]


def _own_pages_only(app: AsgiApp) -> AsgiApp:
    """Refuse what the pages of other sites ask for, except for links."""

    async def own_only(scope: dict[str, object], receive: AsgiReceive, send: AsgiSend) -> None:
        headers = Request(scope).headers
        is_link = headers.get("sec-fetch-mode", "navigate") == "navigate"
        if headers.get("sec-fetch-site", "") in FOREIGN_SITES and not is_link:
            await _refused("A web page from another site may not use this page.")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return own_only


def _refused(why: str) -> Response:
    return Response(_FORM.render(why=why, path=FORM_PATH), STATUS[Code.BAD_KEY], media_type="text/html")
