"""`bombus replay timeline`: what happened, one line per event."""

import argparse
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import get_args

import msgspec

from bombus.hive import events as ev
from bombus.hive.describe import line_of
from bombus.hive.episodes import without_secret
from bombus.hive.events import AnyEvent, kind_of
from bombus.replay.moments import clock, date, moment
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Logged, Source, no_episode
from bombus.terminal import complain, json_escaped, say

KINDS = tuple(sorted(map(kind_of, get_args(AnyEvent))))


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The criteria that select the events to show. A field that is empty excludes nothing; times are nanoseconds on the
    server's clock."""

    engine: str = ""
    episode: str = ""
    model: str = ""
    kinds: frozenset[str] = frozenset()
    since_ns: int = 0
    until_ns: int = 1 << 63
    after: int = 0

    def apply(self, entry: Logged) -> AnyEvent | None:
        """Return the event, or only its part about the chosen episode. Return None if the event is filtered out."""
        event = entry.event
        if not self.since_ns <= entry.time_ns <= self.until_ns:
            return None
        if self.engine and event.engine not in (self.engine, ev.HIVE):
            return None
        if self.kinds and kind_of(event) not in self.kinds:
            return None
        if self.model and not is_of_model(event, self.model):
            return None
        return about(event, self.episode) if self.episode else event


def is_of_model(event: AnyEvent, model: str) -> bool:
    """Return whether an event is about this model of a training client, or about episodes that play with the model."""
    if isinstance(event, ev.EpisodeClaimed):
        return event.sampler is not None and event.sampler.checkpoint.partition("/")[0] == model
    return not isinstance(event, ev.EngineConfigured) and getattr(event, "model", "") == model


def about(event: AnyEvent, episode: str) -> AnyEvent | None:
    """Return the part of an event that is about one episode, or None if there is no such part."""
    match event:
        case ev.EpisodeClaimed() if episode in event.episodes:
            number = event.episodes.index(episode)
            partners = {engine: names[number : number + 1] for engine, names in event.partners.items()}
            return msgspec.structs.replace(event, episodes=(episode,), partners=partners)
        case ev.CallsNoted():
            calls = tuple(call for call in event.calls if call.episode == episode)
            return msgspec.structs.replace(event, calls=calls) if calls else None
        case ev.EpisodeEnded():
            outcomes = tuple(outcome for outcome in event.outcomes if outcome.episode == episode)
            return msgspec.structs.replace(event, outcomes=outcomes) if outcomes else None
        case ev.EpisodeAborted() if episode in event.episodes:
            return msgspec.structs.replace(event, episodes=(episode,))
        case ev.GroupDropped() | ev.EpisodesTaken() if episode in event.episodes:
            return event
        case ev.BatchReady() if any(member.episode == episode for group in event.groups for member in group.episodes):
            return event
        case _:
            return None


async def select(source: Source, chosen: Filter) -> AsyncGenerator[tuple[Logged, AnyEvent], None]:
    """Yield the chosen events, one by one. Raises `NotOnLog` if the log does not have the chosen episode."""
    found = not chosen.episode
    async with aclosing(source.events(0 if chosen.episode else chosen.after)) as entries:
        async for entry in entries:
            found = found or about(entry.event, chosen.episode) is not None
            if entry.seq <= chosen.after:
                continue
            if entry.time_ns > chosen.until_ns:
                break
            event = chosen.apply(entry)
            if event is not None:
                yield entry, event
    if not found:
        raise no_episode(source, chosen.episode)


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("--engine", default="", metavar="NAME", help="only events of this engine (and of the hive)")
    parser.add_argument("--episode", default="", metavar="ID", help="only events about this episode")
    parser.add_argument("--model", default="", metavar="ID", help="only events about this model of a training client")
    parser.add_argument(
        "--kind",
        nargs="+",
        default=[],
        choices=KINDS,
        metavar="KIND",
        help=f"only events of these kinds: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--since",
        metavar="T",
        help="such as 2026-01-31T14:03, 14:03:20 (on the last day), 10m (before the end), +30s (after the start)",
    )
    parser.add_argument("--until", metavar="T", help="like --since (--until=-10m is the same as 10m)")
    parser.add_argument("--after", type=int, default=0, metavar="SEQ", help="only events after this one (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="print at most N events (default: all)")
    parser.add_argument("--json", action="store_true", help="print each event in full, as one JSON object per line")


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay timeline", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    if arguments.limit is not None and arguments.limit < 1:
        raise BadUsage("--limit must be at least 1")
    left = arguments.limit
    day = ""
    shown = False
    async with aclosing(select(source, await _filter(source, arguments))) as entries:
        async for entry, event in entries:
            shown = True
            if arguments.json:
                say(json_escaped(msgspec.json.encode(entry).decode()))
            else:
                if date(entry.time_ns) != day:
                    day = date(entry.time_ns)
                    say(f"-- {day}")
                engine = "" if event.engine == ev.HIVE else event.engine
                say(f"{entry.seq:>8}  {clock(entry.time_ns)}  {engine:<8} {kind_of(event):<17} {line_of(event)}")
            if left is not None:
                left -= 1
                if not left:
                    return
    if not shown:
        complain(f"bombus replay timeline: nothing to show; {await _last(source)}")


async def _last(source: Source) -> str:
    """Return a clause that says which event a log ends with."""
    end = await source.end()
    async with aclosing(source.events(end.seq - 1)) as entries:
        async for entry in entries:
            at = f"{date(entry.time_ns)} {clock(entry.time_ns)}"
            return f"the last event of {source.title} is {entry.seq}, {kind_of(entry.event)}, at {at}"
    return f"{source.title} has no event after {end.seq}"


async def _filter(source: Source, arguments: argparse.Namespace) -> Filter:
    times: dict[str, int] = {}
    if arguments.since or arguments.until:
        start_ns, end_ns = await _span(source)
        for name in ("since", "until"):
            text = getattr(arguments, name)
            if text:
                times[f"{name}_ns"] = moment(text, start_ns, end_ns)
    return Filter(
        engine=arguments.engine,
        episode=without_secret(arguments.episode),
        model=arguments.model,
        kinds=frozenset(arguments.kind),
        after=arguments.after,
        **times,
    )


async def _span(source: Source) -> tuple[int, int]:
    """Return when the first and the last of the remaining events were written."""
    end = await source.end()
    async with aclosing(source.events()) as entries:
        async for entry in entries:
            return entry.time_ns, end.time_ns
    return end.time_ns, end.time_ns
