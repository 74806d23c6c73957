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
from bombus.hive.events import AnyEvent, EpisodeType
from bombus.hive.fates import Fate, StepTokens
from bombus.hive.fold import evolve
from bombus.hive.records import CallRecord, CallRef
from bombus.hive.state import Phase
from bombus_trainer.backends import steps
from bombus_trainer.backends.torch.executor import Executor
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


def leaves_out_a_micro_batch(sharded: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Compute an update as if the last micro-batch of this rank did not exist."""
    return lambda *given, **named: sharded(*given, **named)[:-1]


def repeats_a_micro_batch(sharded: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Compute the last micro-batch of this rank twice."""

    def repeated(*given: Any, **named: Any) -> list[Any]:
        found = sharded(*given, **named)
        return [*found, found[-1]]

    return repeated


@pytest.mark.parametrize(
    ("module", "name", "mistake", "why"),
    [
        (data_batch, "merge_calls", loses_a_token, "sampled 5 tokens, but step 1 accounts for 4: 4 trained"),
        (data_batch, "merge_calls", repeats_a_sequence, "sampled 5 tokens, but step 1 accounts for 10: 10 trained"),
        (steps, "prepare", forgets_an_episode, "sampled 5 tokens, but step 1 accounts for 0"),
        (Executor, "micro_batches", leaves_out_a_micro_batch, "sampled 5 tokens, but step 1 accounts for 0"),
        (Executor, "micro_batches", repeats_a_micro_batch, "sampled 5 tokens, but step 1 accounts for 10: 10 trained"),
    ],
    ids=[
        "a merge that loses a token",
        "a merge that trains twice",
        "a trainer that forgets an episode",
        "a rank that leaves out a micro-batch",
        "a rank that computes a micro-batch twice",
    ],
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


def of_batch(**fields: Any) -> Callable[[Any], list[Any]]:
    """Change the first episode of a batch."""

    def changed(event: ev.BatchReady) -> list[AnyEvent]:
        first, *others = event.groups
        episode = replace(first.episodes[0], **fields)
        return [replace(event, groups=(replace(first, episodes=(episode, *first.episodes[1:])), *others))]

    return changed


def with_a_repeat_for_another(event: ev.CallsNoted) -> list[AnyEvent]:
    """Note the first call once more, as a late call of an episode that is not open."""
    return [event, replace(event, calls=(replace(event.calls[0], episode="main-1-99", late=True),))]


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
    "a call that is noted again for another episode": (ev.CallsNoted, with_a_repeat_for_another, "was noted twice"),
    "a call of versions in the wrong order": (ev.CallsNoted, of_calls(oldest=9), "was sampled by versions 9 to"),
    "an episode that ends with another age": (
        ev.CallsNoted,
        of_calls(oldest=-1),
        "ended with tokens of version 0, but version -1 was noted as the oldest",
    ),
    "an episode to train that ends as an evaluation": (
        ev.EpisodeEnded,
        lambda event: [replace(event, type=EpisodeType.EVAL)],
        "was claimed as an episode to train, but ended as one to eval",
    ),
    "a reward that differs in the batch": (ev.BatchReady, of_batch(reward=7.0), "but is in the batch as t1 with 7"),
    "an episode in the group of another task": (
        ev.BatchReady,
        lambda event: [replace(event, groups=(replace(event.groups[0], task="t2"), *event.groups[1:]))],
        "but is in the batch as t2 with",
    ),
    "a step without a digest of its data": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"data": b""}),
        "step 2 does not say which data it was trained on",
    ),
    "a weight of an episode of which nothing is said": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"weights": {**tokens.weights, "main-1-99": 0.1}}),
        "step 2 gives it a weight, but does not account for it",
    ),
    "an episode whose weight counts twice": (
        ev.StepCompleted,
        of_tokens(
            lambda tokens: {
                "weights": {name: (2 if not n else 1) * w for n, (name, w) in enumerate(tokens.weights.items())}
            }
        ),
        "in one update, but neither all its episodes nor all its tokens have the same weight",
    ),
    "a weight that is not a number": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"weights": dict.fromkeys(tokens.weights, float("nan"))}),
        "with a weight of nan in the loss",
    ),
    "a weight below 0": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"weights": dict.fromkeys(tokens.weights, -0.1)}),
        "with a weight of -0.1 in the loss",
    ),
    "a row with a fate twice": (
        ev.StepCompleted,
        of_tokens(lambda tokens: {"fates": (Fate.TRAINED,) * 2, "episodes": dict.fromkeys(tokens.episodes, (5, 5))}),
        "sampled 5 tokens, but step 2 accounts for 10: 10 trained",
    ),
    "a replica that loads a version before it is there": (
        ev.WeightsLoaded,
        lambda event: [replace(event, version=9)],
        "has loaded version 9, which is not in the log",
    ),
    "a version that samples before it is there": (
        ev.CallsNoted,
        of_calls(newest=7),
        "was sampled by version 7, which is not in the log",
    ),
}


def fold_forgets(engine: Any, event: Any) -> None:
    """Fold an event as if it changed nothing."""


def fold_gives_the_calls_to_another(engine: Any, event: ev.EpisodeEnded) -> None:
    """Fold the end of an episode, and give its calls to the episode before it in the pool."""
    evolve_ended(engine, event)
    *_, before, last = engine.pool.values()
    engine.pool[last.episode] = replace(last, calls=before.calls)


def fold_keeps_the_old_weights(engine: Any, event: ev.WeightsReady) -> None:
    """Fold a new version with the weights of the one before it."""
    before = engine.weights
    evolve_weights(engine, event)
    if before is not None:
        engine.weights = replace(engine.weights, weights=before.weights)


evolve_ended, evolve_weights = evolve._HANDLERS[ev.EpisodeEnded], evolve._HANDLERS[ev.WeightsReady]


IN_THE_FOLD: dict[str, tuple[type[AnyEvent], str]] = {
    "an aborted episode stays open": (ev.EpisodeAborted, "is open according to the state alone"),
    "an ended episode stays open": (ev.EpisodeEnded, "is open according to the state alone"),
    "a claimed episode is not open": (ev.EpisodeClaimed, "is open according to the log's events alone"),
    "calls are not counted": (ev.CallsNoted, "has 0 sampled tokens of this run in the state, but 40 noted"),
    "a completed step's batch stays": (ev.StepCompleted, "is in the batch according to the state alone"),
    "a version is not known": (ev.WeightsReady, "has version -1 in the state, but 2 is the newest"),
    "a sealed batch stays in the pool": (ev.BatchReady, "is in the pool according to the state alone"),
}


async def test_a_call_that_is_noted_again_after_its_episode_is_not_counted_twice(stage: Stage) -> None:
    events = await played(stage)
    late = changed(
        events,
        ev.BatchReady,
        lambda event: [
            event,
            *(
                replace(noted, calls=tuple(replace(call, late=True) for call in noted.calls))
                for noted in events
                if isinstance(noted, ev.CallsNoted)
            ),
        ],
    )
    assert not audited(late).differences
    assert audited(late).tokens == audited(events).tokens


async def test_an_episode_that_is_too_old_for_its_batch_is_found(stage: Stage) -> None:
    events = await played(stage)
    assert not audited(events).differences
    allowed = [
        replace(event, collection=replace(event.collection, max_staleness=1))
        if isinstance(event, ev.EngineConfigured)
        else event
        for event in events
    ]
    assert not audited(allowed).differences
    old = [
        replace(event, calls=tuple(replace(call, oldest=-1) for call in event.calls))
        if isinstance(event, ev.CallsNoted)
        else event
        for event in allowed
    ]
    found = {each.why for each in audited(old).differences}
    assert "is 2 versions old in the batch of step 2, over collection.max_staleness (1)" in found


async def test_a_log_that_was_compacted_anywhere_agrees_with_itself(stage: Stage) -> None:
    audited_from_anywhere(await played(stage))


async def test_mistakes_on_the_log_and_in_its_fold_are_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    events = await played(stage)
    assert not audited(events).differences
    for name, (kind, change, why) in ON_THE_LOG.items():
        found = [difference.why for difference in audited(changed(events, kind, change)).differences]
        assert any(why in each for each in found), f"{name}: {found}"
    for kind, mistake, why in (
        (ev.EpisodeEnded, fold_gives_the_calls_to_another, "has other calls in the state than were noted"),
        (ev.WeightsReady, fold_keeps_the_old_weights, "has other weights of version 2 in the state"),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(evolve._HANDLERS, kind, mistake)
            found = [difference.why for difference in audited(events).differences]
        assert any(why in each for each in found), f"{why}: {found}"
    for name, (kind, why) in IN_THE_FOLD.items():
        with monkeypatch.context() as patched:
            patched.setitem(evolve._HANDLERS, kind, fold_forgets)
            found = [difference.why for difference in audited(events).differences]
        assert any(why in each for each in found), f"{name}: {found}"
