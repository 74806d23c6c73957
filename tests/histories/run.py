"""Plays histories against a hive, many at once, and judges each of them."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from bombus.errors import BusUnavailable, Refused
from tests.histories.chat import Chat
from tests.histories.checks import Evidence, problems
from tests.histories.dialect import Dialect
from tests.histories.engine import Mind
from tests.histories.harness import Harness
from tests.histories.hive import Arena
from tests.histories.messages import Messages
from tests.histories.moves import FAR, move, rewind, turn
from tests.histories.responses import Responses

DIALECTS: tuple[Dialect, ...] = (Chat(), Messages(), Responses(continues=False), Responses(continues=True))
AT_ONCE = 16
TRIES = 3
LONG = 401  # one of so many histories is a long one, in each dialect in turn
LONG_TURNS = 190


@dataclass(frozen=True)
class Outcome:
    """A history, or the first `moves` moves of it, that was played. They are `told` in words. Nothing is wrong if
    `wrong` is empty."""

    seed: int
    number: int
    dialect: str
    moves: int
    told: list[str]
    wrong: list[str]
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """Return what one needs to know of a history that went wrong."""
        lines = [f"history {self.number} of seed {self.seed}, {self.dialect}:", *(f"  {told}" for told in self.told)]
        lines += [f"  WRONG: {wrong}" for wrong in self.wrong[:8]]
        again = f"python -m tests.histories --seed {self.seed} --history {self.number} --moves {self.moves}"
        return "\n".join([*lines, f"  again: {again}"])


@dataclass(frozen=True)
class Played:
    """A history that is over: its harness, what there is to judge it by, and how many moves it has."""

    harness: Harness
    evidence: Evidence
    moves: int


async def play(arena: Arena, seed: int, number: int, moves: int | None = None) -> Outcome:
    """Play a history of a seed, or its first moves alone, and judge it."""
    for _ in range(TRIES - 1):
        try:
            return _judged(await played(arena, seed, number, moves), seed, number)
        except (BusUnavailable, Refused, TimeoutError):  # the machine was too slow for its hive
            continue
    return _judged(await played(arena, seed, number, moves), seed, number)


def _judged(found: Played, seed: int, number: int) -> Outcome:
    harness, records = found.harness, found.evidence.records
    wrong = harness.wrong or [*problems(found.evidence)]
    counts = Counter(
        histories=1,
        calls=len(records),
        tokens=sum(record.completion_tokens() for record in records),
        bridged=sum(record.parent is not None for record in records),
    )
    return Outcome(seed, number, harness.dialect.name, found.moves, harness.told, wrong, counts)


async def played(arena: Arena, seed: int, number: int, moves: int | None = None) -> Played:
    """Play a history of a seed, or its first moves alone. Raises `TimeoutError` when the log has too few calls."""
    chance = random.Random(f"{seed}/{number}")
    dialect = DIALECTS[number % len(DIALECTS)]
    turns = LONG_TURNS if number % LONG == LONG - 1 else 0
    count = turns + chance.randint(2, 10)
    count = count if moves is None else min(count, moves)
    episode, key = await arena.hive.claim()
    mind = arena.engine.minds[episode] = Mind(seed)
    harness = Harness(
        dialect,
        arena.apis,
        key,
        mind,
        chance,
        roams=chance.random() < 0.25,
        streams=chance.choice((0.0, 0.5, 1.0)),
    )
    try:
        await _moves(harness, count, turns)
        records = await arena.records(episode, len(mind.generations))
    finally:
        await arena.abort(episode)
        del arena.engine.minds[episode]
    evidence = Evidence(harness.truth, mind.generations, records, harness.rewrites, harness.roams, dialect.joins_users)
    return Played(harness, evidence, count)


async def _moves(harness: Harness, count: int, turns: int) -> None:
    """Make so many moves. The first `turns` of them are turns of the main conversation, and then it is rewound."""
    main = harness.new_line("main")
    harness.lines.append(main)
    if harness.chance.random() < 0.2:
        await harness.aside(main, next(iter(harness.dialect.auxiliary_calls)))
    await harness.ask(main)
    for number in range(count):
        if number < turns:
            await turn(harness, main)
        elif number == turns > 0:
            await rewind(harness, main, FAR)
        else:
            await move(harness)


async def play_all(arena: Arena, seed: int, numbers: Iterable[int]) -> AsyncIterator[Outcome]:
    """Play histories, some at once, and yield them as they end."""
    waiting = iter(numbers)
    running: set[asyncio.Task[Outcome]] = set()
    while True:
        while len(running) < AT_ONCE and (number := next(waiting, None)) is not None:
            running.add(asyncio.create_task(play(arena, seed, number)))
        if not running:
            return
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            yield task.result()


async def shortened(arena: Arena, bad: Outcome) -> Outcome:
    """Return the same history with as few of its moves as it takes to go wrong."""
    for moves in range(bad.moves):
        found = await play(arena, bad.seed, bad.number, moves)
        if found.wrong:
            return found
    return bad
