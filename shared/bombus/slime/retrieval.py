"""`/retrieve` as in Search-R1's retrieval server, over a small index. Hook files use its address as their
`search_url`."""

import asyncio
from typing import Any

import msgspec

from bombus.errors import Code, Refused, in_one_line
from bombus.hive.decoding import decoded
from bombus.slime.local_server import LocalAnswer
from bombus.tasks.search.corpus import SearchDocument
from bombus.tasks.search.index import LocalIndex

QUERIES_MAX = 1024
COUNT_MAX = 100


class _Retrieve(msgspec.Struct):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


_asked = msgspec.json.Decoder(_Retrieve)


class Retrieval:
    """Answers each query in a request with the documents that match the query best."""

    def __init__(self, index: LocalIndex, count: int = 3) -> None:
        self._index = index
        self._count = count

    async def answer(self, method: str, path: str, body: bytes) -> LocalAnswer:
        """Answer one request. Raises `Refused` if the request is invalid."""
        if (method, path) != ("POST", "/retrieve"):
            raise Refused(Code.UNKNOWN_PATH, f"{method} {path} is not offered: use POST /retrieve")
        try:
            asked = decoded(_asked.decode, body)
        except msgspec.MsgspecError as error:
            raise Refused(Code.MALFORMED, f"the body is not valid: {in_one_line(error)}") from error
        count = asked.topk or self._count
        if len(asked.queries) > QUERIES_MAX or not 1 <= count <= COUNT_MAX:
            why = f"at most {QUERIES_MAX} queries with a topk from 1 to {COUNT_MAX} are taken per request: send fewer"
            raise Refused(Code.TOO_LARGE, why)
        found = await asyncio.to_thread(lambda: [self._found(query, count, asked) for query in asked.queries])
        return LocalAnswer(200, msgspec.json.encode({"result": found}))

    def _found(self, query: str, count: int, asked: _Retrieve) -> list[dict[str, Any]]:
        scores = self._index.scores(query)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:count]
        if not asked.return_scores:
            return [_document(number, self._index.documents[number]) for number in best]
        return [
            {"document": _document(number, self._index.documents[number]), "score": scores[number]} for number in best
        ]


def _document(number: int, document: SearchDocument) -> dict[str, str]:
    return {"id": str(number), "contents": f'"{document.title}"\n{document.text}'}
