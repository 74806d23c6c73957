"""The backends that answer queries: the local index, or Google's Programmable Search Engine."""

import asyncio
import os
from collections.abc import Sequence
from typing import Protocol

import httpx
import msgspec

from bombus.errors import Code, Refused, in_one_line
from bombus.hive.failures import FailureKind
from bombus.sdk.errors import InfraError
from bombus.tasks.search.corpus import SearchDocument
from bombus.tasks.search.index import LocalIndex

GOOGLE_URL = "https://www.googleapis.com/customsearch/v1"
GOOGLE_KEY, GOOGLE_ENGINE = "GOOGLE_API_KEY", "GOOGLE_CSE_ID"
GOOGLE_S = 20.0
GOOGLE_COUNT_MAX = 10  # results per request


class SearchFailed(InfraError):
    """Raised if the search engine gave no answer. The episode is aborted, because the model is not to blame."""

    failure = FailureKind.TOOL


class SearchBackend(Protocol):
    async def search(self, queries: Sequence[str], count: int) -> Sequence[list[SearchDocument] | SearchFailed]:
        """Return the documents for each query, best first, or the error with which the query failed.

        Raises `SearchFailed` if no query could be answered.
        """
        ...


class LocalBackend:
    """Searches an index in this process."""

    def __init__(self, index: LocalIndex) -> None:
        self._index = index

    async def search(self, queries: Sequence[str], count: int) -> list[list[SearchDocument]]:
        return await asyncio.to_thread(lambda: [self._index.search(query, count) for query in queries])


class GoogleBackend:
    """Searches with Google's JSON API, with one request per query. `transport` is for tests. Raises `Refused` if there
    is no key."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        missing = [name for name in (GOOGLE_KEY, GOOGLE_ENGINE) if not os.environ.get(name)]
        if missing:
            raise Refused(
                Code.BAD_CONFIG, f"search_backend=google needs ${' and $'.join(missing)}: set them, or search locally"
            )
        self._login = {"key": os.environ[GOOGLE_KEY], "cx": os.environ[GOOGLE_ENGINE]}
        self._transport = transport

    async def search(self, queries: Sequence[str], count: int) -> list[list[SearchDocument] | SearchFailed]:
        async with httpx.AsyncClient(transport=self._transport, timeout=GOOGLE_S) as client:
            return list(await asyncio.gather(*(self._result(client, query, count) for query in queries)))

    async def _result(self, client: httpx.AsyncClient, query: str, count: int) -> list[SearchDocument] | SearchFailed:
        try:
            return await self._one(client, query, count)
        except SearchFailed as error:
            return error

    async def _one(self, client: httpx.AsyncClient, query: str, count: int) -> list[SearchDocument]:
        asked = {**self._login, "q": query, "num": str(min(count, GOOGLE_COUNT_MAX))}
        try:
            response = await client.get(GOOGLE_URL, params=asked)
        except httpx.HTTPError as error:  # only the error's type is shown, because the request contains the key
            raise SearchFailed(f"Google cannot be reached: {type(error).__name__}") from None
        if response.status_code != 200:
            raise SearchFailed(f"Google answered {response.status_code} to a search")
        try:
            items = msgspec.json.decode(response.content, type=_Found).items
        except msgspec.MsgspecError as error:
            raise SearchFailed(f"Google's answer cannot be read: {in_one_line(error)}") from error
        return [SearchDocument(item.title, item.snippet) for item in items]


class _Item(msgspec.Struct):
    title: str = ""
    snippet: str = ""


class _Found(msgspec.Struct):
    items: list[_Item] = []
