"""A short slice of `make histories`, and that those who judge histories see what is wrong with one."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from bombus.bus import Bus
from bombus.hive.records import CallRecord
from tests.effort import effort
from tests.histories.checks import Evidence, problems
from tests.histories.hive import arena_of
from tests.histories.model import END
from tests.histories.run import Outcome, play_all, played

SEED = 14
HISTORIES = effort(50, 150)
JUDGED = 16
changed = msgspec.structs.replace


async def test_random_histories_lose_nothing_and_are_one_sequence_where_they_are_linear(bus: Bus) -> None:
    counts: Counter[str] = Counter()
    bad: list[Outcome] = []
    async with arena_of(bus) as arena:
        async for outcome in play_all(arena, SEED, range(HISTORIES)):
            counts += outcome.counts
            bad += [outcome] if outcome.wrong else []
    assert not bad, "\n".join(map(str, bad))
    assert counts["histories"] == HISTORIES
    assert counts["bridged"] > counts["calls"] / 2


# ---- the judges ----------------------------------------------------------------------------------------------------


Change = Callable[[Evidence, CallRecord], Iterable[CallRecord]]


def is_lost(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    return ()


def is_sampled_for_a_retry(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    return record, changed(record, id="another")


def lacks_a_token(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    (choice,) = record.choices
    return (changed(record, choices=(changed(choice, tokens=choice.tokens[4:], logprobs=choice.logprobs[4:]),)),)


def has_other_logprobs(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    (choice,) = record.choices
    return (changed(record, choices=(changed(choice, logprobs=bytes(len(choice.logprobs))),)),)


def lacks_a_token_between_turns(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    return (changed(record, prompt_tail=record.prompt_tail[4:], prompt_tokens=record.prompt_tokens - 1),)


def is_no_auxiliary_call(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    return (changed(record, auxiliary_call="" if record.auxiliary_call else "title"),)


def begins_a_line_of_its_own(evidence: Evidence, record: CallRecord) -> Iterable[CallRecord]:
    prompt = b"".join(token.to_bytes(4, "little") for token in evidence.generations[record.id].prompt)
    return (changed(record, parent=None, prompt_tail=prompt),)


CHANGES: list[Change] = [
    is_lost,
    is_sampled_for_a_retry,
    lacks_a_token,
    has_other_logprobs,
    lacks_a_token_between_turns,
    is_no_auxiliary_call,
    begins_a_line_of_its_own,
]


async def test_whatever_is_wrong_with_the_record_of_a_call_is_seen(bus: Bus) -> None:
    """In each history the last call that continues another one is changed; a history without one is passed over."""
    async with arena_of(bus) as arena:
        histories = [(await played(arena, SEED, number)).evidence for number in range(JUDGED)]
    tried: Counter[str] = Counter()
    for evidence in histories:
        assert not [*problems(evidence)]
        whole = [at for at, record in enumerate(evidence.records) if _is_whole(evidence, record)]
        for change in CHANGES if whole else ():
            records = [*evidence.records]
            records[whole[-1] : whole[-1] + 1] = change(evidence, records[whole[-1]])
            wrong = replace(evidence, records=records)
            assert [*problems(wrong)], f"a call that {change.__name__} is not seen"
            tried[change.__name__] += 1
    assert min(tried[change.__name__] for change in CHANGES) > JUDGED / 2


def _is_whole(evidence: Evidence, record: CallRecord) -> bool:
    """Return whether a call continues another one, is continued by none, and has ended by itself."""
    parents = {each.parent.id for each in evidence.records if each.parent is not None}
    answered = {asked.call for asked in evidence.asked}
    whole = record.parent is not None and record.id in answered - parents and not record.auxiliary_call
    return whole and evidence.generations[record.id].tokens[-1] == END
