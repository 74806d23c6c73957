"""What the log has of an episode: its sequences, whether each sampled token is trained once, and where lines part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from bombus.hive.records import CallRecord, CallStatus, unpack_tokens
from bombus_trainer.data.sequences import MergedEpisode, merge_calls

SHOWN = 60  # tokens of each line from the place where two of them part

TextOf = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Rewrite:
    """A call whose prompt is no continuation: after `shared` tokens it has `now` where an earlier line has `before`.

    `call` is its number in the episode.
    """

    call: int
    shared: int
    before: str
    now: str


@dataclass(frozen=True)
class Evidence:
    """An episode as the log has it. `lost` and `twice` have the numbers of calls whose tokens are not trained once.

    `auxiliary_calls` are those of its `calls` that the harness made on its own account. They are not trained, as in a
    job that masks them, and have no sequences.
    """

    calls: int
    auxiliary_calls: int
    sequences: int
    rewrites: tuple[Rewrite, ...]
    lost: tuple[int, ...]
    twice: tuple[int, ...]
    merged: MergedEpisode = field(repr=False)


def evidence_of(records: Sequence[CallRecord], text_of: TextOf) -> Evidence:
    """Read the records of an episode, in the order of the log."""
    numbers = [number for number, record in enumerate(records) if not record.auxiliary_call]  # of the agents' calls
    aside = [record for record in records if record.auxiliary_call]
    merged = merge_calls("episode", [records[number] for number in numbers], aside)
    trained = [0] * len(records)
    for sequence in merged.sequences:
        for call in sequence.calls_T[sequence.loss_mask_T]:
            trained[numbers[call]] += 1
    sampled = [_wanted(record) for record in records]
    numbered = list(enumerate(zip(sampled, trained)))
    return Evidence(
        calls=len(records),
        auxiliary_calls=len(aside),
        sequences=len(merged.sequences),
        rewrites=tuple(rewrites(records, text_of)),
        lost=tuple(number for number, (wanted, found) in numbered if found < wanted),
        twice=tuple(number for number, (wanted, found) in numbered if found > wanted),
        merged=merged,
    )


def _wanted(record: CallRecord) -> int:
    """Return how many tokens of a call are to be trained."""
    return record.completion_tokens() if record.status == CallStatus.COMPLETE and not record.auxiliary_call else 0


def rewrites(records: Sequence[CallRecord], text_of: TextOf) -> Iterator[Rewrite]:
    """Yield the agents' calls, after the first, that continue no line, each beside the line it shares most with."""
    lines: list[list[int]] = []
    by_id: dict[str, list[list[int]]] = {}
    for number, record in enumerate(records):
        parent = by_id[record.parent.id][record.parent_choice] if record.parent is not None else []
        prompt = parent + unpack_tokens(record.prompt_tail)
        if lines and record.parent is None and not record.auxiliary_call:
            nearest = max(lines, key=lambda line: shared(line, prompt))
            start = shared(nearest, prompt)
            if start < len(nearest):
                before, now = nearest[start : start + SHOWN], prompt[start : start + SHOWN]
                yield Rewrite(number, start, text_of(before), text_of(now))
        by_id[record.id] = [prompt + choice.token_ids() for choice in record.choices]
        lines += by_id[record.id] if not record.auxiliary_call else []


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lines have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
