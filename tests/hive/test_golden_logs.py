"""Real logs of every released version decode, fold and read back as they did when they were recorded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bombus.bus import Stored
from bombus.hive.events import decode_event, encode_event
from bombus.replay.archive import FileSource
from bombus.replay.export import calls_of
from tests.logs.facts import FOLDER, TINY, facts_of, recorded

GOLDEN = sorted(FOLDER.glob("*.bombuslog"))


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Iterator[FileSource]:
    with FileSource.open(request.param) as source:
        yield source


async def messages(source: FileSource) -> list[Stored]:
    return [stored async for stored in source.stored()]


def test_there_is_a_golden_log_and_all_of_them_are_small() -> None:
    assert GOLDEN
    assert sum(path.stat().st_size for path in GOLDEN) < 300_000


async def test_it_folds_to_the_same_state_as_when_it_was_recorded(golden: FileSource) -> None:
    expected = recorded(Path(golden.title))
    found = json.loads(json.dumps(await facts_of(golden)))
    for engine, facts in found["engines"].items():  # a later version may count more things
        recorded_counters = expected["engines"][engine]["counters"]
        facts["counters"] = {name: count for name, count in facts["counters"].items() if name in recorded_counters}
    assert found == expected


async def test_every_event_keeps_its_meaning_when_it_is_written_again(golden: FileSource) -> None:
    for stored in await messages(golden):
        event = decode_event(stored.data)
        assert decode_event(encode_event(event)) == event
        again, written = msgspec.msgpack.decode(encode_event(event)), msgspec.msgpack.decode(stored.data)
        assert keeps(again, written), f"event {stored.seq} lost a field"


def keeps(again: Any, written: Any) -> bool:
    """Return whether everything that was written is still there; a later version may have added to it."""
    if isinstance(written, dict):
        return all(name in again and keeps(again[name], value) for name, value in written.items())
    if isinstance(written, list):
        return len(again) >= len(written) and all(map(keeps, again, written))
    return bool(again == written)


def test_a_lost_field_is_detected() -> None:
    assert keeps({"a": [1, [2, 3]], "new": 0}, {"a": [1, [2]]})
    for lost in ({}, {"a": [1]}, {"a": [1, [4]]}):
        assert not keeps(lost, {"a": [1, [2]]})


async def test_every_referenced_call_is_there_and_matches_its_reference(golden: FileSource) -> None:
    refs = [ref for stored in await messages(golden) for ref in calls_of(decode_event(stored.data))]
    records = await golden.records(refs)  # raises when a digest differs
    assert [record.id for record in records] == [ref.id for ref in refs]
    for record in records:
        assert all(len(choice.tokens) == len(choice.logprobs) > 0 for choice in record.choices)
        assert record.messages


def test_the_first_golden_log_has_a_little_of_everything() -> None:
    facts = recorded(TINY)
    kinds = facts["kinds"]
    assert kinds["episode.aborted"] >= 3
    assert kinds["group.dropped"] >= 1
    assert kinds["engine.stopped"] >= 1
    assert len(set(facts["leaders"])) == facts["epoch"] == 2
    assert {batch["run"] for batch in facts["batches"]} == {1, 2}
    assert facts["engines"]["main"]["pool"]
