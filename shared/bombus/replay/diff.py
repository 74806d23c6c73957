"""`bombus replay diff`: what changed between two positions of a log, field by field."""

import argparse
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from bombus.figures import one_line
from bombus.hive.fold.evolve import evolve
from bombus.hive.state import Hive
from bombus.replay.moments import clock
from bombus.replay.opening import add_source_arguments
from bombus.replay.running import BadUsage, run_on_source
from bombus.replay.source import Source, check_position, state_at
from bombus.terminal import say, say_json

ENTRIES_SHOWN = 6  # entries of each collection that are shown as text; the JSON has all of them
VALUE_CHARACTERS = 70


class Verb(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `path` leads from the hive to the changed entry, such as `engines`, `main`, `pool`, `main-1-7`."""

    path: tuple[str, ...]
    verb: Verb
    before: Any = None
    after: Any = None


def changes(before: Hive, after: Hive) -> list[Change]:
    """Return the changes in the order of their paths; within each collection, old entries come before new ones."""
    old, new = (msgspec.to_builtins(hive, order="deterministic") for hive in (before, after))
    return list(_walk((), old, new))


def _walk(path: tuple[str, ...], before: Any, after: Any) -> Iterator[Change]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            below = (*path, str(key))
            if key not in after:
                yield Change(path=below, verb=Verb.REMOVED, before=before[key])
            elif key not in before:
                yield Change(path=below, verb=Verb.ADDED, after=after[key])
            else:
                yield from _walk(below, before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list) and after[: len(before)] == before:
        for index in range(len(before), len(after)):
            yield Change(path=(*path, str(index)), verb=Verb.ADDED, after=after[index])
    else:
        yield Change(path=path, verb=Verb.CHANGED, before=before, after=after)


# ---- the command --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("first", type=int, metavar="SEQ", help="the state after this event")
    parser.add_argument("second", type=int, metavar="SEQ", help="a later event, whose state is compared with the first")
    parser.add_argument("--engine", default="", help="only this engine")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    return run_on_source("bombus replay diff", _show, arguments)


async def _show(source: Source, arguments: argparse.Namespace) -> None:
    first, second = arguments.first, arguments.second
    if first > second:
        raise BadUsage(f"{first} is after {second}: give the earlier position first")
    await check_position(source, second)
    before = await state_at(source, first)
    after = await state_at(source, first)  # a second copy, which is folded further
    async for entry in source.events(first, second):
        evolve(after, entry.event)
    found = changes(before, after)
    if arguments.engine:
        found = [change for change in found if change.path[:2] == ("engines", arguments.engine)]
    if arguments.json:
        say_json([msgspec.to_builtins(change) for change in found])
    else:
        say(*(as_text(found) if found else [f"nothing changed between {first} and {second}"]))


def as_text(found: list[Change]) -> list[str]:
    """Return lines of text. Entries added to or removed from a collection are counted, and only the first few are
    shown."""
    lines: list[str] = []
    grouped: dict[tuple[tuple[str, ...], Verb], list[Change]] = {}
    for change in found:
        path = change.path if change.verb == Verb.CHANGED else change.path[:-1]
        grouped.setdefault((path, change.verb), []).append(change)
    for (path, verb), members in grouped.items():
        where = ".".join(path) or "hive"
        if verb == Verb.CHANGED:
            lines.append(f"  {where}: {' -> '.join(_pair(path, members[0]))}")
            continue
        sign = "+" if verb == Verb.ADDED else "-"
        total = f" ({len(members)})" if len(members) > 1 else ""
        lines.append(f"{sign} {where}{total}")
        for member in members[:ENTRIES_SHOWN]:
            value = member.after if verb == Verb.ADDED else member.before
            lines.append(f"    {one_line(member.path[-1])}: {_short(value)}")
        if len(members) > ENTRIES_SHOWN:
            lines.append(f"    and {len(members) - ENTRIES_SHOWN} more")
    return lines


def _pair(path: tuple[str, ...], change: Change) -> tuple[str, str]:
    """Return both values as short texts. If both are long texts that begin in the same way, that beginning is left
    out."""
    before, after = change.before, change.after
    if path and path[-1].endswith("_ns") and isinstance(before, int) and isinstance(after, int):
        return clock(before) if before else "-", clock(after)
    if isinstance(before, str) and isinstance(after, str):
        same = next((index for index, pair in enumerate(zip(before, after)) if pair[0] != pair[1]), 0)
        if same > VALUE_CHARACTERS // 2:
            before, after = (f"…{text[same - 10 :]}" for text in (before, after))
    return _short(before), _short(after)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= VALUE_CHARACTERS else text[: VALUE_CHARACTERS - 1] + "…"
