"""The state of a log at any position, from keyframes."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import cast

import pytest

from bombus.bus import Bus
from bombus.hive.events import AnyEvent
from bombus.hive.state import Hive
from bombus.insight.keyframes import Keyframes, moment_at
from bombus.insight.record import Moment, Record
from bombus.replay.archive import FileSource
from bombus.replay.diagnosis.steps import StepFigures
from bombus.replay.source import BusSource, NotOnLog, state_at
from tests.insight.long_log import story_events, write_archive, write_events

STEPS = 60


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.bombuslog"
    write_archive(path, list(story_events(STEPS)))
    return path


async def test_the_state_at_any_position_is_the_fold_up_to_there(archive: Path) -> None:
    with FileSource.open(archive) as source:
        end = (await source.end()).seq
        record, keyframes = await recorded(source, events_apart=100)
        assert len(keyframes) > 20
        for position in [0, 1, end, *Random(5).sample(range(end), 30)]:
            moment = await moment_at(source, keyframes, position)
            assert moment.position == position
            assert moment.hive == await state_at(source, position)
        assert moment_of(record.live) == moment_of(await moment_at(source, keyframes, end))


async def recorded(source: FileSource, events_apart: int, bytes_max: int = 1 << 30) -> tuple[Record, Keyframes]:
    hive, position = await source.base()
    record = Record(hive, position)
    keyframes = Keyframes(record.live, events_apart, bytes_max)
    async for entry in source.events():
        record.fold(entry.seq, entry.event, entry.time_ns)
        if entry.seq >= keyframes.next:
            keyframes.keep(record.live)
    return record, keyframes


def moment_of(moment: Moment) -> bytes:
    return moment.copy().encode()


async def test_keyframes_stay_below_their_limit_and_still_give_every_state(archive: Path) -> None:
    with FileSource.open(archive) as source:
        _, all_of_them = await recorded(source, events_apart=50)
        _, bounded = await recorded(source, events_apart=50, bytes_max=all_of_them.bytes // 5)
        assert 3 < len(bounded) < len(all_of_them) / 2
        assert bounded.bytes <= all_of_them.bytes // 5
        for position in (0, 77, 1000):
            assert (await moment_at(source, bounded, position)).hive == await state_at(source, position)


async def test_a_position_before_a_log_begins_is_refused() -> None:
    with pytest.raises(NotOnLog, match="begins later"):
        Keyframes(Moment(Hive(), 10)).before(9)


async def test_what_a_run_had_at_an_earlier_position_is_the_beginning_of_its_series(archive: Path) -> None:
    with FileSource.open(archive) as source:
        record, _ = await recorded(source, events_apart=10_000)
    (series,) = record.runs_at(record.live.position)
    done = [row.done_seq for row in series.steps]
    assert len(done) == STEPS
    assert done == sorted(done)
    assert record.runs_at(series.started_seq - 1) == []


async def test_an_archive_is_read_from_the_middle_without_reading_what_came_before(archive: Path) -> None:
    with FileSource.open(archive) as source:
        everything = [stored async for stored in source.stored()]
        places = len(source._places)
        assert places > 1
        for after in (0, 5, len(everything) // 2, len(everything) - 1):
            assert [stored async for stored in source.stored(after)] == everything[after:]


async def test_an_archive_keeps_a_bounded_number_of_places(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bombus.replay.archive.PLACE_BYTES", 1_000)
    monkeypatch.setattr("bombus.replay.archive.PLACES_MAX", 20)
    with FileSource.open(archive) as source:
        everything = [stored async for stored in source.stored()]
        assert 5 < len(source._places) <= 20
        for after in Random(3).sample(range(len(everything)), 20):
            assert [stored.seq async for stored in source.stored(after, after + 3)] == [
                seq for seq in range(after + 1, after + 4) if seq <= len(everything)
            ]


async def test_a_log_that_grows_is_read_on(bus: Bus) -> None:
    events = [event for _, event in zip(range(6), story_events(1))]
    source = BusSource(bus, "the log")
    await write_events(bus, events[:3])
    assert [entry.seq async for entry in source.events()] == [1, 2, 3]
    await write_events(bus, events[3:], first=4)
    assert [entry.seq async for entry in source.events()] == [1, 2, 3]
    assert [entry.event async for entry in source.events(3, 6)] == events[3:]
    assert [stored.seq async for batch in source.newer(2) for stored in batch] == [3, 4, 5, 6]
    assert [batch async for batch in source.newer(6)] == []


def test_findings_that_are_forgotten_while_a_thread_collects_them_are_no_error() -> None:
    record = Record(Hive(), 0)
    for seq, event in enumerate(story_events(3), 1):
        record.fold(seq, cast(AnyEvent, event), event.at_ns)
    series = record.runs.series["main-1"]

    class Forgetting(list[StepFigures]):
        def __iter__(self) -> Iterator[StepFigures]:
            yield from super().__iter__()
            record.examine_again(series, 0)

    record.findings(series, Forgetting(series.steps))
    record.findings(series, series.steps)
