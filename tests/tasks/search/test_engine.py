"""The index, the cache, batches, and Google's answers."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from bombus.errors import Refused
from bombus.tasks.search.backends import GoogleBackend, SearchFailed
from bombus.tasks.search.corpus import SearchDocument, bundled_documents, bundled_questions
from bombus.tasks.search.engine import BATCH_MAX, SearchCache, SearchEngine
from bombus.tasks.search.index import LocalIndex


class Recording:
    """A backend that answers each query with itself, and notes what it was asked and how much of it at once."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.running = 0
        self.most = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def search(self, queries: Sequence[str], count: int) -> list[list[SearchDocument] | SearchFailed]:
        self.batches.append(list(queries))
        self.running += len(queries)
        self.most = max(self.most, self.running)
        await self.go_on.wait()
        self.running -= len(queries)
        if "broken" in queries:
            raise SearchFailed("the backend broke")
        return [[SearchDocument(query, "")] for query in queries]


def test_bm25_by_hand() -> None:
    index = LocalIndex([SearchDocument("a", "cat"), SearchDocument("b", "dog dog"), SearchDocument("c", "bird")])
    assert [found.title for found in index.search("the dog", 3)] == ["b"]
    # One of three documents has the word: ln(1 + 2.5/1.5) = 0.980829. Twice in three words, where the mean
    # is 7/3: 1.2 * (0.25 + 0.75 * 9/7) = 1.457143. So 0.980829 * 2 * 2.2 / (2 + 1.457143) = 1.248328.
    assert index.scores("the dog") == {1: pytest.approx(1.248328, abs=1e-6)}
    assert index.search("fish", 3) == []


def test_one_search_finds_what_most_of_the_bundled_questions_ask_for() -> None:
    index = LocalIndex(bundled_documents())
    questions = bundled_questions()
    found = [
        any(question.answers[0] in document.text for document in index.search(question.question, 3))
        for question in questions
    ]
    assert len(questions) >= 150
    assert sum(found) / len(found) > 0.75
    assert len({question.question for question in questions}) == len(questions)


async def test_queries_that_come_together_are_one_batch_and_equal_ones_are_asked_once() -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=256)
    found = await asyncio.gather(*(engine.search(query) for query in ("a", "b", " a ", "a")))
    assert backend.batches == [["a", "b"]]
    assert [each[0].title for each in found] == ["a", "b", "a", "a"]
    assert await engine.search("b") == (SearchDocument("b", ""),)
    assert engine.figures() == {"searches": 5, "cache_hit_rate": 0.2, "batches": 1}


async def test_no_more_than_so_many_queries_are_answered_at_a_time() -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=100)
    backend.go_on.clear()
    searching = asyncio.gather(*(engine.search(str(number)) for number in range(300)))
    while not backend.batches:
        await asyncio.sleep(0)
    backend.go_on.set()
    assert len(await searching) == 300
    assert backend.most <= 100
    assert max(map(len, backend.batches)) <= BATCH_MAX


@pytest.mark.parametrize("at_once", [1, 5])
async def test_a_batch_is_never_larger_than_what_may_be_answered_at_a_time(at_once: int) -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=at_once)
    found = await asyncio.gather(*(engine.search(str(number)) for number in range(12)))
    assert [each[0].title for each in found] == [str(number) for number in range(12)]
    assert max(map(len, backend.batches)) <= at_once


async def test_a_query_that_is_under_way_is_not_asked_again() -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=256)
    backend.go_on.clear()
    first = asyncio.create_task(engine.search("a"))
    while not backend.batches:
        await asyncio.sleep(0)
    second = asyncio.create_task(engine.search("a"))
    await asyncio.sleep(0)
    backend.go_on.set()
    assert await first == await second
    assert backend.batches == [["a"]]


async def test_a_failure_reaches_those_who_asked_and_is_not_remembered() -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=256)
    results = await asyncio.gather(engine.search("broken"), engine.search("x"), return_exceptions=True)
    assert all(isinstance(result, SearchFailed) for result in results)
    assert await engine.search("x") == (SearchDocument("x", ""),)


async def test_who_gives_up_leaves_the_answer_to_the_others() -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=256)
    backend.go_on.clear()
    one, other = asyncio.create_task(engine.search("a")), asyncio.create_task(engine.search("a"))
    while not backend.batches:
        await asyncio.sleep(0)
    one.cancel()
    backend.go_on.set()
    assert await other == (SearchDocument("a", ""),)
    assert len(backend.batches) == 1


def test_an_engine_is_shared_by_several_event_loops() -> None:
    backend = Recording()
    engine = SearchEngine(backend, count=3, at_once=256)
    for _ in range(2):
        assert asyncio.run(engine.search("a")) == (SearchDocument("a", ""),)
    assert backend.batches == [["a"]]


def test_the_cache_forgets_what_was_asked_longest_ago() -> None:
    cache = SearchCache(size=2)
    for query in ("a", "b"):
        cache.put(query, ())
    assert cache.get("a") == ()
    cache.put("c", ())
    assert cache.get("b") is None
    assert cache.get("a") == ()
    assert (cache.hits, cache.misses, len(cache)) == (2, 1, 2)


def test_the_answers_to_the_newest_ten_thousand_queries_are_kept() -> None:
    cache = SearchEngine(Recording(), count=3, at_once=256).cache
    for number in range(10_001):
        cache.put(str(number), ())
    assert len(cache) == 10_000
    assert (cache.get("0"), cache.get("1")) == (None, ())
    assert cache.hit_rate == 0.5


# ---- Google ---------------------------------------------------------------------------------------------------


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_API_KEY", "k-secret")
    monkeypatch.setenv("GOOGLE_CSE_ID", "engine")


@pytest.mark.usefixtures("login")
async def test_google_is_asked_for_each_query() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        if request.url.params["q"] == "nothing":
            return httpx.Response(200, json={"searchInformation": {}})
        return httpx.Response(200, json={"items": [{"title": "T", "snippet": "S", "link": "http://x"}]})

    found = await GoogleBackend(httpx.MockTransport(answer)).search(["a", "nothing"], 3)
    assert found == [[SearchDocument("T", "S")], []]
    assert asked[0] == {"key": "k-secret", "cx": "engine", "q": "a", "num": "3"}
    await GoogleBackend(httpx.MockTransport(answer)).search(["a"], 100)
    assert asked[-1]["num"] == "10"  # which is all that Google gives


@pytest.mark.usefixtures("login")
async def test_a_query_that_google_refuses_is_the_only_one_that_fails() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["q"])
        if request.url.params["q"] == "bad":
            return httpx.Response(400)
        return httpx.Response(200, json={"items": [{"title": request.url.params["q"], "snippet": "S"}]})

    engine = SearchEngine(GoogleBackend(httpx.MockTransport(answer)), count=3, at_once=256)
    queries = [f"q{number}" for number in range(31)] + ["bad"] + [f"q{number}" for number in range(31, 63)]
    found = await asyncio.gather(*(engine.search(query) for query in queries), return_exceptions=True)
    assert engine.batches == 1
    assert [query for query, each in zip(queries, found) if isinstance(each, SearchFailed)] == ["bad"]
    assert await engine.search("q62") == (SearchDocument("q62", "S"),)
    assert len(asked) == 64
    with pytest.raises(SearchFailed, match="Google answered 400"):  # which is not remembered
        await engine.search("bad")
    assert len(asked) == 65


@pytest.mark.usefixtures("login")
@pytest.mark.parametrize(
    "response", [httpx.Response(429), httpx.Response(200, text="no JSON"), httpx.ConnectError("key=k-secret")]
)
async def test_a_failure_of_google_is_infrastructure_and_shows_no_key(response: httpx.Response | Exception) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    (failed,) = await GoogleBackend(httpx.MockTransport(answer)).search(["a"], 3)
    assert isinstance(failed, SearchFailed)
    assert "k-secret" not in str(failed)


def test_google_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    monkeypatch.setenv("GOOGLE_CSE_ID", "engine")
    with pytest.raises(Refused, match=r"search_backend=google needs \$GOOGLE_API_KEY: set"):
        GoogleBackend()
