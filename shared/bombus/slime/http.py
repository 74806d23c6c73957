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
from bombus.sdk.transport import HttpPools

RETRIES_MAX = 60
PAUSE_S = 1.0
CONNECT_S = 10.0
REPEATED = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which a retry may succeed

log = logging.getLogger("bombus.slime")
_pools: dict[int, HttpPools[httpx.AsyncClient]] = {}  # by event loop, because they cannot be used in another loop


def pools() -> HttpPools[httpx.AsyncClient]:
    """Return the clients for this event loop. They have no timeout for responses, because a model may take very
    long."""
    key = id(asyncio.get_running_loop())
    if key not in _pools:
        _pools.clear()
        timeout, checks = httpx.Timeout(None, connect=CONNECT_S), certificates(False)
        _pools[key] = HttpPools(lambda: httpx.AsyncClient(timeout=timeout, trust_env=False, verify=checks))
    return _pools[key]


async def close_clients() -> None:
    found = _pools.pop(id(asyncio.get_running_loop()), None)
    for http in found.made if found is not None else ():
        await http.aclose()


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
            with pools().client() as http:
                response = await http.post(url, json=payload or {}, headers=headers)
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
    with pools().client() as http:
        response = await http.get(url)
    response.raise_for_status()
    return response.json()


def _read(response: httpx.Response) -> Any:
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return response.text
