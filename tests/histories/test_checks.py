"""What those who judge histories expect of answers that say the same."""

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bombus.bus import Bus
from bombus.hive.generation import Generate
from bombus.hive.records import unpack_tokens
from tests.histories import entries
from tests.histories.answers import Plan
from tests.histories.checks import Evidence, problems
from tests.histories.engine import UNIT, Generation, Mind
from tests.histories.entries import VERBATIM, Style
from tests.histories.harness import Harness
from tests.histories.hive import arena_of
from tests.histories.model import END, TEXT
from tests.histories.responses import Responses

UNNAMED = Style(bare=True)
NAMED = VERBATIM  # by the ids of its items


class Agreeing(Mind):
    """A model that says the same to everything."""

    def answer(self, request: Generate) -> tuple[Generation, Sequence[int]]:
        tokens = (*TEXT.tokenizer.encode("ok"), END)
        logprobs = tuple(-UNIT * (self._sampled + number) for number in range(1, len(tokens) + 1))
        self._sampled += len(tokens)
        generation = Generation(tuple(unpack_tokens(request.prompt)), Plan("ok"), tokens, logprobs, "stop")
        self.generations[request.id] = generation
        return generation, [len(tokens)]


async def two_lines(bus: Bus, *later: tuple[int, Style]) -> Evidence:
    """Let two lines ask the same, and then those of these numbers go on, with their answers in these styles."""
    async with arena_of(bus) as arena:
        episode, key = await arena.hive.claim()
        mind = arena.engine.minds[episode] = Agreeing(0)
        dialect = Responses(continues=False)
        harness = Harness(dialect, arena.apis, key, mind, random.Random(0), roams=False, streams=0.0)
        line = harness.new_line("main")
        said = [await harness.send(line, line.entries) for _ in range(2)]
        for number, style in later:
            answer = said[number]
            assert answer is not None
            await harness.send(line, (*line.entries, entries.answer(answer, style), entries.user(f"I am {number}.")))
        records = await arena.records(episode, 2 + len(later))
    assert not harness.wrong
    return Evidence(harness.truth, mind.generations, records, 1, roams=False, joins_users=dialect.joins_users)


def parents(evidence: Evidence) -> list[int]:
    """Return the numbers of the records that those after the first two continue."""
    numbers = {record.id: number for number, record in enumerate(evidence.records)}
    return [numbers[record.parent.id] for record in evidence.records[2:] if record.parent is not None]


async def test_a_line_shares_the_answer_that_it_names_with_one_that_had_to_take_any(bus: Bus) -> None:
    evidence = await two_lines(bus, (1, UNNAMED), (0, NAMED))
    assert parents(evidence) == [0, 0]
    assert not [*problems(evidence)]
    assert [*problems(replace(evidence, rewrites=0))] == ["3 sequences, and the moves explain 2"]


async def test_a_line_that_shares_an_answer_although_another_is_free_is_seen(bus: Bus) -> None:
    evidence = await two_lines(bus, (0, NAMED), (1, UNNAMED))
    assert parents(evidence) == [0, 1]
    assert not [*problems(evidence)]
    *earlier, named, unnamed = evidence.records
    shared = replace(evidence, records=[*earlier, named, msgspec.structs.replace(unnamed, parent=named.parent)])
    assert [*problems(shared)] == ["3 sequences, and the moves explain 2"]
