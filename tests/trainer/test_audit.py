"""An audit of a real run: every token is accounted for, and planted mistakes of the bookkeeping are found."""

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bombus.bus import Bus
from bombus.config.algorithms import Correction
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.events import AnyEvent
from bombus.hive.fates import Fate, StepTokens
from bombus.hive.fold import evolve
from bombus.hive.records import CallRecord, CallRef
from bombus.hive.state import Phase
from bombus_trainer.backends import steps
from bombus_trainer.data import batch as data_batch
from bombus_trainer.data.batch import EpisodeGroup, PreparedBatch
from bombus_trainer.data.sequences import MergedEpisode
from bombus_trainer.settings import TrainerSettings
from tests.trainer.trainer_hive import ENGINE, Stage, audited, audited_from_anywhere, staged

Events = list[AnyEvent]


@pytest.fixture
async def stage(bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(bus, tmp_path, sound=False) as stage:
        yield stage


async def played(stage: Stage, **trainer: Any) -> Events:
    """Train two steps, leave a batch untrained, and abort an episode; return all events."""
    stage.train()
    await stage.start(stage.job(**trainer))
    for step in (1, 2):
        await stage.until(Phase.ROLLING, step - 1)
        await stage.play_batch(shift=step)
        await stage.follower.wait_for(lambda _, step=step: stage.engine.version == step)  # type: ignore[misc]
    await stage.until(Phase.ROLLING, 2)
    claim = inbox.Claim(id=stage.id(), engine=ENGINE, claim=stage.id(), client="c", count=2, wait_s=5.0)
    granted = await stage.bus.inbox.request(claim)
    assert isinstance(granted, inbox.Granted)
    abort = inbox.Abort(id=stage.id(), engine=ENGINE, client="c", episodes=granted.episodes[:1])
    await stage.bus.inbox.request(abort)
    return stage.events


async def test_every_token_of_a_run_is_accounted_for(stage: Stage) -> None:
    report = audited(await played(stage))
    assert not report.differences
    assert report.sampled == sum(report.tokens.values()) == 2 * 4 * 5
    assert report.tokens == {Fate.TRAINED: 40}
    assert [(step.step, step.tokens) for step in report.steps] == [(1, 20), (2, 20)]
    assert all(step.data and step.weights for step in report.steps)
    assert len({step.data for step in report.steps}) == 2


@pytest.mark.parametrize(
    "rule",
    [{"correction": Correction.ICEPOP, "tis_clip_low": 1e-6, "tis_clip": 0.5}, {"use_opsm": True, "opsm_delta": 0.0}],
)
async def test_tokens_that_the_loss_leaves_out_are_masked(stage: Stage, rule: dict[str, Any]) -> None:
    events = await played(stage, **rule)
    report = audited(events)
    assert not report.differences
    shares = [event.metrics["masked_share"] for event in events if isinstance(event, ev.StepCompleted)]
    masked = round(20 * sum(shares))
    assert 0 < masked < 40
    assert report.tokens == {Fate.TRAINED: 40 - masked, Fate.MASKED_OFF_POLICY: masked}


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def loses_a_token(merge: Callable[..., MergedEpisode]) -> Callable[..., MergedEpisode]:
    """Merge as if the last sampled token of each sequence were the prompt's."""

    def merged(episode: str, records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> MergedEpisode:
        found = merge(episode, records, context)
        for sequence in found.sequences:
            sequence.loss_mask_T[-1] = False
        return dataclasses.replace(found, trained_tokens=found.trained_tokens - len(found.sequences))

    return merged


def repeats_a_sequence(merge: Callable[..., MergedEpisode]) -> Callable[..., MergedEpisode]:
    """Merge as if an episode had two sequences, where it has one."""

    def merged(episode: str, records: Sequence[CallRecord], context: Sequence[CallRecord] = ()) -> MergedEpisode:
        found = merge(episode, records, context)
        twice = (*found.sequences, *found.sequences)
        return dataclasses.replace(found, sequences=twice, trained_tokens=2 * found.trained_tokens)

    return merged


def forgets_an_episode(prepare: Callable[..., PreparedBatch]) -> Callable[..., PreparedBatch]:
    """Prepare a batch without the sequences of its first episode."""

    def prepared(groups: Sequence[EpisodeGroup], settings: TrainerSettings, vocab_size: int) -> PreparedBatch:
        found = prepare(groups, settings, vocab_size)
        first = found.groups[0]
        return dataclasses.replace(
            found, groups=(dataclasses.replace(first, sequences=first.sequences[1:]), *found.groups[1:])
        )

    return prepared


@pytest.mark.parametrize(
    ("module", "name", "mistake", "why"),
    [
        (data_batch, "merge_calls", loses_a_token, "sampled 5 tokens, but step 1 accounts for 4: 4 trained"),
        (data_batch, "merge_calls", repeats_a_sequence, "sampled 5 tokens, but step 1 accounts for 10: 10 trained"),
        (steps, "prepare", forgets_an_episode, "sampled 5 tokens, but step 1 accounts for 0"),
    ],
    ids=["a merge that loses a token", "a merge that trains twice", "a trainer that forgets an episode"],
)
async def test_mistakes_of_the_merge_and_the_trainer_are_found(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mistake: Callable[[Any], Any], why: str
) -> None:
    monkeypatch.setattr(module, name, mistake(getattr(module, name)))
    report = audited(await played(stage))
    assert report.differences_count >= 2
    assert why in [difference.why for difference in report.differences]


def changed(events: Events, kind: type[AnyEvent], change: Callable[[Any], list[Any]]) -> Events:
    """Return the events with the last one of a kind replaced."""
    at = max(number for number, event in enumerate(events) if isinstance(event, kind))
    return [*events[:at], *change(events[at]), *events[at + 1 :]]


def of_tokens(change: Callable[[StepTokens], dict[str, Any]]) -> Callable[[Any], list[Any]]:
    return lambda event: [replace(event, tokens=replace(event.tokens, **change(event.tokens)))]


def of_calls(**fields: Any) -> Callable[[Any], list[Any]]:
    return lambda event: [replace(event, calls=tuple(replace(each, **fields) for each in event.calls))]


def with_a_call_of_nobody(event: ev.CallsNoted) -> list[AnyEvent]:
    first = event.calls[0]
    return [replace(event, calls=(*event.calls, replace(first, episode="main-1-99", ref=CallRef(1, "x", b""))))]


ON_THE_LOG: dict[str, tuple[type[AnyEvent], Callable[[Any], list[Any]], str]] = {
    "a call that is noted twice": (ev.CallsNoted, lambda event: [event, event], "was noted twice"),
    "a call that is not noted": (ev.CallsNoted, lambda event: [], "ended with 5 tokens, but 0 were noted"),
    "an episode that ends with other tokens": (
        ev.EpisodeEnded,
        lambda event: [replace(event, outcomes=tuple(replace(each, completion_tokens=4) for each in event.outcomes))],
        "ended with 4 tokens, but 5 were noted",
    ),
    "an episode that ends without a claim": (ev.EpisodeClaimed, lambda event: [], "was aborted, but was not open"),
    "a batch that is sealed twice": (ev.BatchReady, lambda event: [event, event], "was not in the pool"),
    "a step that is completed twice": (ev.StepCompleted, lambda event: [event, event], "completed without its batch"),
    "a step that leaves out an episode": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"episodes": dict(list(tokens.episodes.items())[1:])}),
        "step 2 does not account for it",
    ),
    "a step that trains an episode and leaves it out": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"left_out": {next(iter(tokens.episodes)): Fate.DROPPED_STALE}}),
        "step 2 both accounts for it and leaves it out",
    ),
    "a row without a count for each fate": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"fates": (Fate.TRAINED, Fate.MASKED_GREEDY)}),
        "step 2 accounts for it with (5,) of 2 fates",
    ),
    "a row with a count below 0": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"fates": tuple(Fate)[:4], "episodes": dict.fromkeys(tokens.episodes, (7, -2, 0, 0))}),
        "step 2 accounts for it with (7, -2, 0, 0) of 4 fates",
    ),
    "a trained episode without a weight": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"weights": {}}),
        "step 2 has trained 5 tokens of it, with a weight of None in the loss",
    ),
    "a call in time of an episode that is not open": (
        ev.CallsNoted,
        with_a_call_of_nobody,
        "call x was noted in time, but it is not open",
    ),
    "a late call of an episode that is open": (ev.CallsNoted, of_calls(late=True), "was noted as late, but it is open"),
    "an end by another client": (
        ev.EpisodeEnded,
        lambda event: [replace(event, client="other")],
        "was ended by client other, but claimed by c",
    ),
    "calls of another run": (
        ev.CallsNoted,
        lambda event: [replace(event, run=7)],
        "calls.noted is of run 7, but the current run is 1",
    ),
    "a step of another run": (
        ev.StepCompleted,
        lambda event: [replace(event, run=7)],
        "step.completed is of run 7, but the current run is 1",
    ),
    "a batch that skips a step": (
        ev.BatchReady,
        lambda event: [replace(event, step=3)],
        "the batch of step 3 was sealed after step 1",
    ),
    "a step that is never completed": (
        ev.StepCompleted,
        lambda event: [],
        "version 2 is ready, but its step was not completed",
    ),
    "a version that is published twice": (
        ev.WeightsReady,
        lambda event: [event, event],
        "version 2 was published twice",
    ),
    "an adapter that nobody saved": (
        ev.CallsNoted,
        of_calls(sampler="f00"),
        "was sampled by adapter f00, which nobody saved",
    ),
    "a version that samples before it is there": (
        ev.CallsNoted,
        of_calls(newest=7),
        "was sampled by version 7, which is not in the log",
    ),
}


def fold_forgets(engine: Any, event: Any) -> None:
    """Fold an event as if it changed nothing."""


IN_THE_FOLD: dict[str, tuple[type[AnyEvent], str]] = {
    "an aborted episode stays open": (ev.EpisodeAborted, "is open according to the state alone"),
    "an ended episode stays open": (ev.EpisodeEnded, "is open according to the state alone"),
    "a claimed episode is not open": (ev.EpisodeClaimed, "is open according to the log's events alone"),
    "calls are not counted": (ev.CallsNoted, "has 0 sampled tokens of this run in the state, but 40 noted"),
    "a completed step's batch stays": (ev.StepCompleted, "is in the batch according to the state alone"),
    "a version is not known": (ev.WeightsReady, "has version -1 in the state, but 2 is the newest"),
    "a sealed batch stays in the pool": (ev.BatchReady, "is in the pool according to the state alone"),
}


async def test_a_log_that_was_compacted_anywhere_agrees_with_itself(stage: Stage) -> None:
    audited_from_anywhere(await played(stage))


async def test_mistakes_on_the_log_and_in_its_fold_are_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    events = await played(stage)
    assert not audited(events).differences
    for name, (kind, change, why) in ON_THE_LOG.items():
        found = [difference.why for difference in audited(changed(events, kind, change)).differences]
        assert any(why in each for each in found), f"{name}: {found}"
    for name, (kind, why) in IN_THE_FOLD.items():
        with monkeypatch.context() as patched:
            patched.setitem(evolve._HANDLERS, kind, fold_forgets)
            found = [difference.why for difference in audited(events).differences]
        assert any(why in each for each in found), f"{name}: {found}"
