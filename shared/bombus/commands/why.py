"""`bombus why`: shows what is waiting for what, since when, and who could end it, from a log alone."""

import argparse
import time
from contextlib import aclosing

import msgspec

from bombus.hive.episodes import without_secret
from bombus.hive.events import LeadingPaused
from bombus.hive.pauses import LATE_NS
from bombus.hive.why.chains import chain
from bombus.hive.why.links import NOBODY, TIME, ChainLink
from bombus.insight.record import Moment
from bombus.replay.moments import clock, date, moment
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import run_on_source
from bombus.replay.source import NotOnLog, Source, check_position
from bombus.terminal import say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="RUN|EPISODE|ENGINE",
        help="a run (main-2), episode (main-2-17), engine (main) or client's model (default: every waiting engine)",
    )
    add_source_arguments(parser)
    parser.add_argument(
        "--at",
        default="",
        metavar="SEQ|TIME",
        help="after this event, or at a time such as 14:03:20, 10m (before the log's end) or +30s (after its start); "
        "default: now, or the log's end if its hive has stopped",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus why", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    at, led_ns = await moment_of(source, arguments.at)
    names = [without_secret(arguments.name)] if arguments.name else sorted(at.hive.engines)
    chains: dict[str, list[ChainLink]] = {}
    for name in names:
        found = chain(at.hive, at.now_ns, at.last, name, led_ns)
        if found is None:
            engines = ", ".join(sorted(at.hive.engines)) or "none"
            raise NotOnLog(
                f"there is no engine, run or episode {name} at event {at.position}; the engines are: {engines}"
            )
        if found or arguments.name:
            chains[name] = found
    if arguments.json:
        say_json({"seq": at.position, "at_ns": at.now_ns, "chains": msgspec.to_builtins(chains)})
        return
    when = f", {date(at.now_ns)} {clock(at.now_ns)}" if at.now_ns else ""
    over = "" if arguments.at or source.running else ": the log's end, as no hive is running on it"
    say(f"after event {at.position}{when}{over}")
    for name, links in chains.items():
        say("", *(_lines(links) if links else [f"{name} is not waiting for anything"]))
    if not chains:
        say("", "nothing is waiting" if at.hive.engines else "no engine yet")


def _lines(links: list[ChainLink]) -> list[str]:
    first, *others = links
    last = links[-1]
    end = f"; otherwise it ends at {clock(last.until_ns)}" if last.until_ns and last.who != TIME else ""
    lines = [first.what, *(f"  {link.what}" for link in others)]
    return lines if last.who == NOBODY else [*lines, f"  who can end this: {last.who}{end}"]


async def moment_of(source: Source, text: str) -> tuple[Moment, int]:
    """Fold a log up to a position or a time or, if `text` is empty, to its end. Raises `NotOnLog`.

    Returns when a leader was last at work as well, or 0 if that is unknown.
    """
    end, led_ns = await source.end(), await source.led_ns()
    newest_ns = max(end.time_ns, led_ns, time.time_ns() if source.running else 0)
    at = Moment(*await source.base())
    if text and not text.isdecimal():
        return at, await _fold_until(source, at, text, newest_ns)
    until = int(text) if text else end.seq
    await check_position(source, until)
    async with aclosing(source.events(at.position, until)) as entries:
        async for entry in entries:
            at.fold(entry.seq, entry.event, entry.time_ns)
    if text:
        return at, 0
    at.now_ns = newest_ns
    return at, led_ns


async def _fold_until(source: Source, at: Moment, text: str, newest_ns: int) -> int:
    """Fold a log up to a time. The events after that time show whether there was a leader then: returns since when
    there was none, or 0."""
    until_ns = next_ns = led_ns = 0
    async with aclosing(source.events(at.position)) as entries:
        async for entry in entries:
            if not until_ns:
                start_ns = at.now_ns or entry.time_ns
                until_ns = moment(text, start_ns, (await source.end()).time_ns)
                if not start_ns <= until_ns <= newest_ns:
                    span = f"{date(start_ns)} {clock(start_ns)} to {date(newest_ns)} {clock(newest_ns)}"
                    raise NotOnLog(f"{source.title} does not cover this time: it spans {span}")
            if entry.time_ns <= until_ns:
                at.fold(entry.seq, entry.event, entry.time_ns)
                continue
            next_ns = next_ns or entry.time_ns
            if isinstance(entry.event, LeadingPaused) and entry.event.since_ns < until_ns:
                led_ns = entry.event.since_ns
            if entry.time_ns > next_ns + LATE_NS:
                break
    at.now_ns = max(at.now_ns, until_ns)
    return led_ns
