"""Access control: checks the key in a request, for every route that needs one.

The hive's keys are sent as `Authorization: Bearer <key>` or as `x-api-key: <key>`; clients that cannot set a header put
`/k/<key>` before the path.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fastapi import Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from starlette.types import Scope

from bombus.errors import Code, Refused
from bombus.hive.episodes import KEY_PREFIX
from bombus.hive.shares import share_name
from bombus.machine.hive_keys import HiveKeys, KeyRing, matching, presented
from bombus.machine.host_names import RawHeaders, foreign_page
from bombus_gateway.keys import KeyClaims, Keys

PATH_KEY = "/k/"

HeaderMap = dict[bytes, bytes]


class Access(StrEnum):
    """Who may use a route. Routes that are open to all have no guard; routes for model calls have an `EpisodeGuard`."""

    CLIENT = "client"  # claim and end episodes, read the state of the engine
    CONTROL = "control"  # change what an engine does


@dataclass(frozen=True)
class KeyHolder:
    """The holder of a key: the key's name and limits (see `hive_keys.NamedKey`; 0 means no limit). `admin` is true for
    the holder of the admin key."""

    name: str = ""
    open_max: int = 0
    waiting_max: int = 0
    idle_max_s: float = 0.0
    admin: bool = False

    @property
    def share(self) -> str:
        """Return the name of the share that this holder's requests and episodes count against."""
        return share_name(self.name, self.admin)


NOBODY = KeyHolder()  # the sender of a request with an unnamed client key, or with no key
OPERATOR = KeyHolder(admin=True)


def without_path_key(scope: Scope) -> Scope:
    """Move the key in the path of a request to `/k/<key>/...` into a header."""
    key, slash, rest = scope["path"].removeprefix(PATH_KEY).partition("/")
    headers = [*scope["headers"], (b"x-api-key", key.encode())]
    bare = {name: value for name, value in scope.items() if name != "raw_path"}
    return {**bare, "path": f"{slash}{rest}" or "/", "headers": headers}


class Guard(SecurityBase):
    """Guards the routes of one kind of access: FastAPI's routes as a dependency, all others through `refusal`.

    The admin key opens client routes too. If only a client key is set, control routes require that key, since they must
    not be easier to reach than client routes. A route that needs no key is open to everyone except web pages from other
    sites. `changing_get` marks a GET route that changes something: such a route refuses links from other sites too.
    """

    def __init__(self, access: Access, ring: KeyRing, public_url: str, changing_get: bool = False) -> None:
        self._access = access
        self._ring = ring
        self._read()
        self._public_url = public_url.rstrip("/")
        self._changing_get = changing_get
        # For the OpenAPI document that FastAPI generates.
        self.scheme_name = f"{'admin' if access == Access.CONTROL else 'client'}_key"
        self.model = HTTPBearer(description="needed if the hive has one")

    def _read(self) -> None:
        """Take over the keys that are valid now."""
        self._keys = keys = self._ring.keys
        admins = dict.fromkeys(keys.admins, OPERATOR)
        if self._access == Access.CONTROL and keys.admin:
            self._name, holders = "admin", admins
        else:
            self._name, holders = "client", _client_holders(keys)
        self._opening = {key.encode(): holder for key, holder in holders.items()}
        self._known = {**{key.encode(): holder for key, holder in admins.items()}, **self._opening}

    async def __call__(self, request: Request) -> None:
        refusal = self.refusal(request.scope["headers"])
        if refusal is not None:
            raise refusal

    def refusal(self, headers: RawHeaders) -> Refused | None:
        """Return why a request with these headers may not pass, or None if it may."""
        if self._keys is not self._ring.keys:
            self._read()
        if not self._opening:
            return self._foreign_page(headers)
        sent = presented(headers)
        if matching(sent, self._opening) is not None:
            return None
        found = "another key was sent" if sent else "no key was sent"
        return Refused(
            Code.BAD_KEY,
            f"This route needs the hive's {self._name} key, but {found}: send it as `Authorization: Bearer <key>` or "
            "`x-api-key: <key>`, or put `/k/<key>` before the path.",
        )

    def holder(self, headers: RawHeaders) -> KeyHolder:
        """Return the holder of the key in an accepted request, or `NOBODY` if the key is unnamed or the request has
        none."""
        if self._keys is not self._ring.keys:
            self._read()
        return matching(presented(headers), self._known) or NOBODY

    def _foreign_page(self, headers: RawHeaders) -> Refused | None:
        """Return the refusal of a request made by another site's web page, or None for any other request."""
        page = foreign_page(headers, self._public_url, self._changing_get)
        if not page:
            return None
        return Refused(
            Code.BAD_KEY,
            f"{page} may not use this hive. If that is the hive's own address, start the gateway with it as "
            "--public-url; to let other sites in, set keys for the hive.",
        )


class EpisodeGuard:
    """Verifies episode keys for the APIs of one engine or, with `any_engine`, for those of every engine."""

    def __init__(self, keys: Keys, engine: str, any_engine: bool) -> None:
        self._keys = keys
        self._engine = engine
        self._any_engine = any_engine

    def verify(self, key: str, now_ns: int) -> KeyClaims:
        """Return what a key allows. Raises `Refused` BAD_KEY if the key is not valid here, and KEY_EXPIRED if it has
        expired."""
        claims = self._keys.verify(key, now_ns)
        if claims.engine != self._engine and not self._any_engine:
            raise Refused(
                Code.BAD_KEY, f"This key is for engine {claims.engine}, but these are the APIs of {self._engine}."
            )
        return claims


def episode_key(headers: Mapping[bytes, bytes]) -> str:
    """Return a request's episode key, from its bearer token or its `x-api-key`. Some clients send both headers.

    Raises `Refused` BAD_KEY if the request has neither.
    """
    sent = [key.decode("latin-1") for key in presented(headers.items()) if key]
    if not sent:
        raise Refused(
            Code.BAD_KEY, f"Send an episode's key as 'Authorization: Bearer {KEY_PREFIX}...' or as 'x-api-key'."
        )
    return next((key for key in sent if key.startswith(KEY_PREFIX)), sent[0])


def _client_holders(keys: HiveKeys) -> dict[str, KeyHolder]:
    """Return the holders of the keys that open client routes, by key, or an empty dict if these routes need no key."""
    if not keys.for_clients:
        return {}
    found = dict.fromkeys(keys.unnamed, NOBODY) | dict.fromkeys(keys.admins, OPERATOR)
    for name, each in keys.clients.items():
        holder = KeyHolder(name, each.open_max, each.waiting_max, each.idle_max_s)
        found |= dict.fromkeys((each.key, each.before) if each.before else (each.key,), holder)
    return found
