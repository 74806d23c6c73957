"""A made-up run of any length, as an archive or on a bus."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bombus.bus import Bus
from bombus.config.job import RunConfig
from bombus.hive import events as ev
from bombus.hive.events import Event, encode_event, kind_of
from bombus.replay.archive import FORMAT, ArchiveHeader, EventFrame, Trailer, pack
from tests.overwatch.story import Story


def story_events(steps: int) -> Iterator[Event]:
    """Yield the events of a run of a job that completes `steps` steps."""
    story = Story()
    story.boot()
    story.publish(0)
    for version in range(steps):
        if version % 4 == 0:
            story.evaluate(version)
        story.train(version)
        for event in story.events:
            if isinstance(event, ev.EngineConfigured):
                event = msgspec.structs.replace(event, config=RunConfig().to_json())
            yield event
        story.events.clear()


def write_archive(path: Path, events: list[Event]) -> None:
    """Write events as an archive of the hive `main`, without calls."""
    last_ns = max(event.at_ns for event in events)
    header = ArchiveHeader(format=FORMAT, bombus="0", hive="main", last=len(events), last_ns=last_ns)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(pack(header))
        for seq, event in enumerate(events, 1):
            subject = f"bombus.main.event.{event.engine}.{kind_of(event)}"
            file.write(pack(EventFrame(seq, event.at_ns, subject, {}, encode_event(event))))
        file.write(pack(Trailer(len(events), 0, 0)))


async def write_events(bus: Bus, events: Sequence[Event], first: int = 1) -> None:
    """Write events on a bus, of which the first has the number `first`."""
    for number, event in enumerate(events, first):
        subject = bus.subjects.event(event.engine, kind_of(event))
        await bus.publisher.publish(subject, encode_event(event), msg_id=f"e{number}")
