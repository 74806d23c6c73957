"""`post` and `get` from `slime.utils.http_utils`, which hook files call."""

import asyncio
import logging
import random
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from bombus.machine.certificates import certificates

RETRIES_MAX = 60
PAUSE_S = 1.0
CONNECT_S = 10.0
REPEATED = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which a retry may succeed

log = logging.getLogger("bombus.slime")
_clients: dict[int, httpx.AsyncClient] = {}  # keyed by event loop, because a client cannot be used in another loop


def client() -> httpx.AsyncClient:
    """Return the client for this event loop. It has no timeout for responses, because a model may take very long."""
    key = id(asyncio.get_running_loop())
    if key not in _clients:
        _clients.clear()
        _clients[key] = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
            verify=certificates(False),
        )
    return _clients[key]


async def close_client() -> None:
    found = _clients.pop(id(asyncio.get_running_loop()), None)
    if found is not None:
        await found.aclose()


def init_http_client(args: Namespace) -> None:
    """Do nothing: a client is created when it is first used."""


async def post(
    url: str, payload: object, max_retries: int = RETRIES_MAX, headers: Mapping[str, str] | None = None
) -> Any:
    """Return the response as decoded JSON if possible, otherwise as text. Retry if the server is busy or cannot be
    reached.

    Raises `httpx.HTTPError` after the last attempt, or immediately if the request itself is refused.
    """
    for attempt in range(1, max_retries + 1):
        try:
            response = await client().post(url, json=payload or {}, headers=headers)
        except httpx.RequestError as error:
            if attempt == max_retries:
                raise
            log.info("%s: %r; attempt %d of %d", url, error, attempt, max_retries)
        else:
            if response.is_success:
                return _read(response)
            if response.status_code not in REPEATED or attempt == max_retries:
                why = f"{url} answered {response.status_code}: {response.text[:1000]}"
                raise httpx.HTTPStatusError(why, request=response.request, response=response)
            log.info("%s answered %d; attempt %d of %d", url, response.status_code, attempt, max_retries)
        await asyncio.sleep(PAUSE_S * (0.5 + random.random()))
    raise ValueError("max_retries must be at least 1")


async def get(url: str) -> Any:
    response = await client().get(url)
    response.raise_for_status()
    return response.json()


def _read(response: httpx.Response) -> Any:
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return response.text
