"""`/retrieve`, as Search-R1's clients ask it."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from bombus.slime.local_server import BODY_BYTES_MAX, HOST, LocalServer
from bombus.slime.retrieval import Retrieval
from bombus.tasks.search.corpus import SearchDocument
from bombus.tasks.search.index import LocalIndex

DOCUMENTS = [SearchDocument("Bees", "they dance"), SearchDocument("Wasps", "they sting"), SearchDocument("Sun", "warm")]
UNREADABLE = (b'{"queries": "\xff"}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}")


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = LocalServer(Retrieval(LocalIndex(DOCUMENTS)).answer)
    port = await server.open()
    yield f"http://{HOST}:{port}/retrieve"
    await server.close()


async def ask(url: str, body: object, status: int = 200) -> Any:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(url, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_queries_are_answered_in_one_request_the_best_document_first(url: str) -> None:
    answer = await ask(url, {"queries": ["they sting", "warm", "nothing"], "topk": 1, "return_scores": False})
    assert answer == {
        "result": [
            [{"id": "1", "contents": '"Wasps"\nthey sting'}],
            [{"id": "2", "contents": '"Sun"\nwarm'}],
            [],
        ]
    }
    (scored,) = (await ask(url, {"queries": ["they sting"], "return_scores": True}))["result"]
    assert [one["document"]["id"] for one in scored] == ["1", "0"]
    assert scored[0]["score"] > scored[1]["score"] > 0


async def test_what_does_not_fit_is_refused_in_words(url: str) -> None:
    assert "topk from 1 to 100" in str(await ask(url, {"queries": ["a"], "topk": 101}, 413))
    assert "the body is not valid" in str(await ask(url, {"queries": "a"}, 400))
    async with httpx.AsyncClient(trust_env=False) as http:
        for unreadable in UNREADABLE:
            answer = await http.post(url, content=unreadable)
            assert (answer.status_code, "the body is not valid" in answer.text) == (400, True)
    assert "use POST /retrieve" in str(await ask(url + "/x", {}, 404))


async def test_a_body_over_the_limit_is_refused_and_the_connection_goes_on(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(url, content=b" " * (BODY_BYTES_MAX + 1))
        assert (answer.status_code, "over 64 MiB" in answer.text) == (413, True)
        assert (await http.post(url, json={"queries": []})).json() == {"result": []}
