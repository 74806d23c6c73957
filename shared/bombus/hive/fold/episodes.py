"""Folds the events about episodes: claims, calls, ends, the pool, and batches."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.events import AbortReason, EpisodeType
from bombus.hive.fold import trajectories
from bombus.hive.fold.handlers import Handlers
from bombus.hive.records import CallRef, CallStatus
from bombus.hive.rollouts import STEPS_KEPT, RolloutFigures
from bombus.hive.state import (
    ACTIVE_S,
    CALLS_KEPT,
    DATA_SETS_MAX,
    EVALS_KEPT,
    OUTCOMES_KEPT,
    Closed,
    Completed,
    EngineState,
    Episode,
    EvalFigures,
    EvalStats,
)
from bombus.hive.steps import SealedStep, episodes_of

HANDLERS = Handlers()
NameT = TypeVar("NameT", bound=str)


def ended_calls(outcome: ev.Outcome, episode: Episode | None) -> tuple[CallRef, ...]:
    """Return the calls of an episode's outcome. If the outcome lists none, return the complete calls of the open
    episode."""
    if outcome.calls or episode is None:
        return outcome.calls
    return tuple(call.ref for call in episode.complete_calls())


@HANDLERS.on(ev.EpisodeClaimed)
def _claimed(engine: EngineState, event: ev.EpisodeClaimed) -> None:
    for number, episode in enumerate(event.episodes):
        engine.open[episode] = Episode(
            id=episode,
            claim=event.claim,
            client=event.client,
            type=event.type,
            discard_timeout_s=event.discard_timeout_s,
            claimed_ns=event.at_ns,
            version=event.version,
            task_hint=event.task_hint,
            owner=event.owner,
            admin=event.admin,
            calls_from=engine.newest_call,
            sampler=event.sampler,
            partners={name: ids[number] for name, ids in event.partners.items() if number < len(ids)},
            touches=event.touches,
        )
        engine.calls.claim(engine.open[episode].holder, episode, engine.newest_call)
    if event.type == EpisodeType.TRAIN:
        _count(engine.open_tasks, event.task_hint, len(event.episodes))
    engine.claims[event.claim] = event.episodes
    engine.next_episode += len(event.episodes)
    engine.counters.claimed += len(event.episodes)


@HANDLERS.on(ev.CallsNoted)
def _calls_noted(engine: EngineState, event: ev.CallsNoted) -> None:
    counters, noted = engine.counters, engine.noted
    for call in event.calls:
        call_id = call.ref.id
        if call_id in noted:  # its report was repeated: earlier versions noted it again
            continue
        noted[call_id] = None
        counters.calls += 1
        counters.calls_merged += call.merged and not call.masked
        counters.calls_masked += call.masked
        counters.calls_incomplete += call.incomplete
        counters.prompt_tokens += call.prompt_tokens
        counters.completion_tokens += call.completion_tokens
        episode = engine.open.get(call.episode)
        known = episode or engine.closed.get(call.episode)
        engine.calls.store(call.holder if known is None else known.holder, call.bytes)
        if not call.episode:
            engine.newest_call = call.ref.seq
            continue
        if call.late or episode is None:
            counters.calls_late += 1
            continue
        episode.calls.append(call)
        if call.status == CallStatus.COMPLETE and not call.masked:
            _count_aged(engine, episode, -1)
            episode.oldest = call.oldest if episode.oldest is None else min(episode.oldest, call.oldest)
            _count_aged(engine, episode, 1)
        if call.ref.seq < episode.calls_from:  # a power cut has removed the end of the stream (R6)
            episode.calls_from = call.ref.seq
            engine.calls.lower(episode.holder, episode.id, call.ref.seq)
        episode.last_call_ns = event.at_ns
        engine.newest_call = call.ref.seq
    if len(noted) > CALLS_KEPT:
        trim(noted, CALLS_KEPT)


def _count(counts: dict[NameT, int], name: NameT, more: int) -> None:
    left = counts.get(name, 0) + more
    if left:
        counts[name] = left
    else:
        counts.pop(name, None)


def _count_aged(engine: EngineState, episode: Episode, more: int) -> None:
    if episode.oldest is None or episode.type != EpisodeType.TRAIN:
        return
    tasks = engine.open_aged.setdefault(episode.oldest, {})
    _count(tasks, episode.task_hint, more)
    if not tasks:
        del engine.open_aged[episode.oldest]


def _close(engine: EngineState, episode_id: str, closed: Closed) -> Episode | None:
    episode = engine.open.pop(episode_id, None)
    if episode is not None:
        closed = Closed(closed.client, closed.outcome, closed.aborted, episode.holder)
        if episode.type == EpisodeType.TRAIN:
            _count(engine.open_tasks, episode.task_hint, -1)
        _count_aged(engine, episode, -1)
        siblings = engine.claims.get(episode.claim, ())
        if engine.open.keys().isdisjoint(siblings):
            engine.claims.pop(episode.claim, None)
    engine.closed[episode_id] = closed
    if len(engine.closed) > OUTCOMES_KEPT:
        trim(engine.closed, OUTCOMES_KEPT)
    return episode


@HANDLERS.on(ev.EpisodeEnded)
def _ended(engine: EngineState, event: ev.EpisodeEnded) -> None:
    engine.counters.ended += len(event.outcomes)
    _note_reward(engine, event.client, event.at_ns)
    is_eval = event.type == EpisodeType.EVAL
    for outcome in event.outcomes:
        if outcome.failure is not None:
            _count(engine.counters.ended_by, outcome.failure, 1)
        episode = _close(engine, outcome.episode, Closed(event.client, outcome.digest))
        if is_eval and (episode is None or episode.sampler is None):
            _count_evaluation(engine, event.version, outcome, episode)
        if is_eval:
            engine.calls.release((outcome.episode,))
            continue
        before = _leave_pool(engine, outcome.episode)  # if a log ends an episode twice, the later end counts
        if before is None:
            engine.collected.add(outcome)
        calls = ended_calls(outcome, episode) or (before.calls if before is not None else ())
        size = 200 + 8 * outcome.completion_tokens + 100 * len(calls)
        engine.pool[outcome.episode] = Completed(
            episode=outcome.episode,
            task=outcome.task,
            client=event.client,
            reward=outcome.reward,
            call_rewards=outcome.call_rewards,
            calls=calls,
            oldest=outcome.oldest,
            bytes=size,
            ended_ns=event.at_ns,
            calls_from=next((each.calls_from for each in (episode, before) if each is not None), 0),
            sampler="" if episode is None or episode.sampler is None else episode.sampler.checkpoint,
            owner=next((each.owner for each in (episode, before) if each is not None), ""),
        )
        engine.by_task.setdefault(outcome.task, []).append(outcome.episode)
        engine.pool_bytes += size


def _count_evaluation(engine: EngineState, claimed: int, outcome: ev.Outcome, episode: Episode | None) -> None:
    """Count an evaluation episode for the version that sampled it or, if it has no calls, the version at its claim.

    If the episode has tokens of several versions, count it as mixed at the version of its claim. Episodes from data
    sets over the limit count only in their version's totals.
    """
    calls = () if episode is None else episode.complete_calls()
    oldest = min((call.oldest for call in calls), default=claimed)
    is_mixed = any(call.newest > oldest for call in calls)
    stats = engine.evals.setdefault(claimed if is_mixed else oldest, EvalStats())
    counted: list[EvalFigures] = [stats]
    name = outcome.data_set
    if name and (name in stats.data_sets or len(stats.data_sets) < DATA_SETS_MAX):
        counted.append(stats.data_sets.setdefault(name, EvalFigures()))
    for figures in counted:
        (figures.mixed if is_mixed else figures).add(outcome)
    trim(engine.evals, EVALS_KEPT)


def _note_reward(engine: EngineState, client: str, at_ns: int) -> None:
    """Record that a client is active. Inactive clients are forgotten, since nothing else limits the number of
    clients."""
    seen = engine.rewarded_ns
    seen.pop(client, None)
    seen[client] = at_ns  # moved to the end, so that the first client is the one that has been silent longest
    limit_ns = int(ACTIVE_S * 1e9)
    if seen[next(iter(seen))] < at_ns - 2 * limit_ns:
        engine.rewarded_ns = {name: last_ns for name, last_ns in seen.items() if last_ns >= at_ns - limit_ns}


@HANDLERS.on(ev.EpisodeAborted)
def _aborted(engine: EngineState, event: ev.EpisodeAborted) -> None:
    engine.counters.aborted += len(event.episodes)
    if (failure := event.failed_by) is not None:
        _count(engine.counters.aborted_by, failure, len(event.episodes))
    engine.calls.release(event.episodes)
    for episode_id in event.episodes:
        episode = engine.open.get(episode_id)
        _close(engine, episode_id, Closed(episode.client if episode else "", aborted=event.reason))
        if event.reason == AbortReason.SILENT and episode is not None:
            engine.rewarded_ns.pop(episode.client, None)  # its client is not active, so its agreement is not needed


# ---- the pool and its batches ---------------------------------------------------------------------------------


def _leave_pool(engine: EngineState, episode_id: str) -> Completed | None:
    completed = engine.pool.pop(episode_id, None)
    if completed is None:
        return None
    engine.pool_bytes -= completed.bytes
    rest = engine.by_task[completed.task]
    rest.remove(episode_id)
    if not rest:
        del engine.by_task[completed.task]
    return completed


def take(engine: EngineState, episodes: Iterable[str]) -> int:
    """Remove episodes from the pool, and release their calls. Return how many of the episodes were in the pool."""
    gone = [episode for episode in episodes if _leave_pool(engine, episode) is not None]
    engine.calls.release(gone)
    return len(gone)


@HANDLERS.on(ev.GroupDropped)
def _group_dropped(engine: EngineState, event: ev.GroupDropped) -> None:
    engine.counters.dropped += take(engine, event.episodes)


@HANDLERS.on(ev.EpisodesTaken)
def _episodes_taken(engine: EngineState, event: ev.EpisodesTaken) -> None:
    engine.counters.taken += take(engine, event.episodes)


@HANDLERS.on(ev.PoolCleared)
def _pool_cleared(engine: EngineState, event: ev.PoolCleared) -> None:
    engine.counters.dropped += len(engine.pool)
    engine.calls.release(engine.pool)
    engine.pool = {}
    engine.by_task = {}
    engine.pool_bytes = 0


def _with_calls(engine: EngineState, event: ev.BatchReady) -> ev.BatchReady:
    """Return the batch with its episodes' calls. These come from the pool, in which the episodes stay until the batch
    is folded."""

    def filled(episode: ev.BatchEpisode) -> ev.BatchEpisode:
        completed = engine.pool.get(episode.episode)
        if episode.calls or completed is None:
            return episode
        return msgspec.structs.replace(episode, calls=completed.calls, call_rewards=completed.call_rewards)

    groups = tuple(
        msgspec.structs.replace(group, episodes=tuple(map(filled, group.episodes))) for group in event.groups
    )
    return msgspec.structs.replace(event, groups=groups)


@HANDLERS.on(ev.BatchReady)
def _batch_ready(engine: EngineState, event: ev.BatchReady) -> None:
    event = _with_calls(engine, event)
    if event.taken:
        taken = trajectories.seal(engine.trajectories, event.taken)
        event = msgspec.structs.replace(event, rollout_groups=event.rollout_groups or taken)
    engine.batch = event
    engine.step = event.step
    engine.step_failures = engine.trainers_lost = 0
    left = [_leave_pool(engine, episode.episode) for group in event.groups for episode in group.episodes]
    sealed = [completed for completed in left if completed is not None]
    engine.counters.trained += len(sealed) + sum(group.sequences for group in event.rollout_groups)
    engine.steps_from.append(min((completed.calls_from for completed in sealed), default=engine.newest_call))
    engine.steps.append(SealedStep(batch=event))
    release_steps(engine, engine.steps)
    engine.collected.step = event.step
    engine.rollouts.append(engine.collected)
    engine.collected = RolloutFigures()
    del engine.rollouts[:-STEPS_KEPT]
    del engine.steps_from[: -max(engine.steps_needed, engine.collection.replay_steps)]


def release_steps(engine: EngineState, before: list[SealedStep]) -> None:
    """Release the calls of the steps in `before` that will not have to be repeated."""
    gone = before[: len(before) - len(engine.needed_steps)]
    for step in gone:
        step.released = True
    engine.calls.release(episodes_of(gone))
