"""The status of a hive as data and as JSON. All of it is derived from the fold, without requests to any server."""

import msgspec

from bombus.figures import duration, seconds_between
from bombus.hive.checkpoints import where_begun
from bombus.hive.collection import measures
from bombus.hive.describe import why_quarantined
from bombus.hive.operations.state import ClientModel
from bombus.hive.pacing import pace
from bombus.hive.rollouts import RolloutFigures
from bombus.hive.state import EngineState, Episode, EvalStats, Hive, Phase, engine_of
from bombus.hive.status.detail import detail_of, disagreement_of, lost_text, no_trainer, noting, silence_of
from bombus.hive.status.rows import (
    DataSetStatus,
    EngineStatus,
    EvalStatus,
    FormatStatus,
    HiveStatus,
    ModelStatus,
    MultiModelClaimStatus,
    OpenEpisode,
    OperationsStatus,
    ReplicaStatus,
    StepRollouts,
    StepStatus,
    TrainerStatus,
)
from bombus.hive.trajectories.status import rollout_group_status

LOSS_SHOWN_S = 86_400.0  # how long a status shows that a stream has lost its end


def _open_episode(episode: Episode, now_ns: int) -> OpenEpisode:
    return OpenEpisode(
        episode=episode.id,
        client=episode.client,
        type=episode.type,
        task=episode.task_hint,
        version=episode.version,
        calls=len(episode.calls),
        completion_tokens=sum(call.completion_tokens for call in episode.calls),
        idle_s=seconds_between(episode.active_ns, now_ns),
        limit_s=episode.discard_timeout_s,
        owner=episode.owner,
        partners=tuple(name for _, name in sorted(episode.partners.items())),
    )


def multi_model_claims(hive: Hive, now_ns: int) -> tuple[MultiModelClaimStatus, ...]:
    """Return the claims of open multi-model episodes, sorted so that those idle longest come first."""
    found: dict[tuple[str, tuple[str, ...]], list[list[Episode]]] = {}
    for name, engine in sorted(hive.engines.items()):
        for episode in engine.open.values():
            if episode.partners and name < min(episode.partners):  # list each once, at its first engine
                parts = [episode, *sorted(hive.partners(episode), key=lambda part: engine_of(part.id))]
                engines = tuple(engine_of(part.id) for part in parts)
                found.setdefault((episode.claim, engines), []).append(parts)
    rows = (_multi_model_claim(engines, episodes, now_ns) for (_, engines), episodes in found.items())
    return tuple(sorted(rows, key=lambda row: (-row.idle_s, row.episodes)))


def _multi_model_claim(engines: tuple[str, ...], episodes: list[list[Episode]], now_ns: int) -> MultiModelClaimStatus:
    first = episodes[0][0]
    active_ns = [max(part.active_ns for part in parts) for parts in episodes]
    calls = [call for parts in episodes for part in parts for call in part.calls]
    return MultiModelClaimStatus(
        engines=engines,
        episodes=tuple(tuple(part.id for part in parts) for parts in episodes),
        client=first.client,
        type=first.type,
        task=first.task_hint,
        calls=len(calls),
        completion_tokens=sum(call.completion_tokens for call in calls),
        idle_s=seconds_between(min(active_ns), now_ns),
        limit_s=first.discard_timeout_s,
        owner=first.owner,
    )


def _trainer(engine: EngineState, now_ns: int) -> TrainerStatus:
    batch = engine.batch
    return TrainerStatus(
        trainer=engine.trainer,
        epoch=engine.trainer_epoch,
        step_in_flight=batch.step if batch else None,
        step_since_ns=batch.at_ns if batch else 0,
        groups=len(batch.groups) if batch else 0,
        episodes=sum(len(group.episodes) for group in batch.groups) if batch else 0,
        failures=engine.step_failures,
        absence=no_trainer(engine, now_ns),
    )


def _last_step(engine: EngineState) -> StepStatus | None:
    """Return the newest step that this run made itself, not the step of an earlier run at which it began."""
    done = engine.step_done
    if done is None or done.run != engine.run:
        return None
    return StepStatus(step=done.step, at_ns=done.at_ns, metrics=done.metrics)


def _replicas(engine: EngineState) -> tuple[ReplicaStatus, ...]:
    has_canary = engine.weights is not None and engine.weights.canary is not None
    return tuple(
        ReplicaStatus(
            replica=name,
            url=replica.url,
            capacity=replica.capacity,
            run=replica.run,
            version=replica.version,
            current=name in engine.loaded,
            sequence_tokens=replica.sequence_tokens,
            constrains=replica.constrains,
            quarantined="" if replica.quarantined is None else why_quarantined(replica.quarantined),
            canary=replica.canary,
            unchecked=has_canary and name in engine.loaded and replica.canary is None,
        )
        for name, replica in sorted(engine.replicas.items())
    )


def _model_status(engine: EngineState, model: ClientModel, now_ns: int) -> ModelStatus:
    session = engine.clients.sessions.get(model.session)
    return ModelStatus(
        model=model.name,
        session=model.session,
        owner="" if session is None else session.owner,
        base=model.base,
        adapter=model.adapter,
        step=model.step,
        waiting=model.waiting,
        executed=model.executed,
        checkpointed=model.checkpointed,
        idle_s=seconds_between(model.last_ns, now_ns),
        last_op=model.last_op,
        last_failed=model.last_failed,
        scored=model.scored,
        stepped=model.stepped,
    )


def _operations(engine: EngineState, now_ns: int) -> OperationsStatus | None:
    clients = engine.clients
    if not (clients.accepted or clients.sessions):
        return None
    return OperationsStatus(
        sessions=sum(session.ended is None for session in clients.sessions.values()),
        models=tuple(_model_status(engine, model, now_ns) for model in clients.open_models),
        accepted=clients.accepted,
        waiting=clients.waiting,
        executed=clients.executed,
        failed=clients.failed,
        held_bytes=clients.held_bytes,
        result_bytes=clients.result_bytes,
        saved=len(clients.kept),
    )


def engine_status(engine: EngineState, now_ns: int, refusing: str = "") -> EngineStatus:
    """Return the status of an engine. `refusing` is why the hive accepts no new work.

    `now_ns` is the caller's time, because the fold's time does not advance while there are no events.
    """
    source = engine.active or engine.configured
    episodes = [_open_episode(episode, now_ns) for episode in engine.open.values()]
    formats = tuple(FormatStatus(gateway=each.gateway, format=each.format) for each in engine.formats)
    return EngineStatus(
        engine=engine.name,
        phase=engine.phase,
        phase_s=seconds_between(engine.phase_since_ns, now_ns) if engine.phase_since_ns else 0.0,
        detail=noting(detail_of(engine, now_ns), refusing),
        failure=engine.failure,
        suspended=engine.suspended,
        until_served=engine.until_served,
        model=source.model if source else "",
        run=engine.run,
        begun="" if engine.started is None else where_begun(engine.started),
        global_step=engine.global_step,
        version=engine.version,
        method=engine.collection.method,
        progress=measures(engine, now_ns),
        pool_episodes=len(engine.pool),
        pool_bytes=engine.pool_bytes,
        open_episodes=tuple(sorted(episodes, key=lambda row: (-row.idle_s, row.episode))),
        replicas=_replicas(engine),
        trainer=_trainer(engine, now_ns),
        last_step=_last_step(engine),
        evals=tuple(
            EvalStatus(
                version=version,
                episodes=stats.episodes,
                mean_reward=stats.mean,
                success_rate=stats.success_rate,
                mixed=stats.mixed.episodes,
                mixed_mean_reward=stats.mixed.mean,
                data_sets=_data_sets(stats),
            )
            for version, stats in sorted(engine.evals.items())
        ),
        pace=pace(engine) if engine.phase == Phase.ROLLING else None,
        formats=formats,
        disagreement=disagreement_of(formats),
        clients_take_episodes=engine.clients_take_episodes,
        batches_from_queue=engine.batches_from_queue,
        operations=_operations(engine, now_ns),
        taken=engine.counters.taken,
        calls_incomplete=engine.counters.calls_incomplete,
        rollout_groups=rollout_group_status(engine.trajectories, engine.queues_groups and engine.makes_steps),
        rollouts=tuple(_rollout(each) for each in engine.rollouts if each.rewards.count),
        silent=silence_of(engine),
        aborted_by=engine.counters.aborted_by,
        ended_by=engine.counters.ended_by,
    )


def _rollout(figures: RolloutFigures) -> StepRollouts:
    return StepRollouts(
        step=figures.step,
        episodes=figures.rewards.count,
        mean_reward=figures.rewards.mean,
        success_rate=figures.successes.mean if figures.successes.count else None,
        mean_completion_tokens=figures.completion_tokens.mean,
        metrics={name: metric.mean for name, metric in sorted(figures.metrics.items())},
    )


def hive_status(hive: Hive, now_ns: int | None = None) -> HiveStatus:
    """Return the status of every engine, by default at the time of the newest event."""
    now_ns = hive.now_ns if now_ns is None else max(now_ns, hive.now_ns)
    engines = (engine_status(engine, now_ns, hive.refusing_of(engine)) for _, engine in sorted(hive.engines.items()))
    aside = tuple(f"{event.message} {event.id} of {event.about}: {event.why}" for event in hive.aside)
    return HiveStatus(
        epoch=hive.epoch,
        now_ns=now_ns,
        engines=tuple(engines),
        multi_model=multi_model_claims(hive, now_ns),
        refusing=hive.refusing_groups,
        dead_letters=aside,
        uncompacted=hive.uncompacted,
        went_back=tuple(
            f"{lost_text(lost)} (found {duration(ago_s)} ago)"
            for lost in hive.went_back.values()
            if (ago_s := seconds_between(lost.at_ns, now_ns)) < LOSS_SHOWN_S
        ),
        level=hive.level,
    )


def status_dict(hive: Hive, now_ns: int | None = None) -> dict[str, object]:
    """Return `hive_status` as plain JSON values. Numbers that are not finite become null."""
    encoded = msgspec.json.encode(hive_status(hive, now_ns))
    return msgspec.json.decode(encoded, type=dict[str, object])


def _data_sets(stats: EvalStats) -> tuple[DataSetStatus, ...]:
    return tuple(
        DataSetStatus(
            data_set=name,
            episodes=each.episodes,
            mean_reward=each.mean,
            success_rate=each.success_rate,
            mixed=each.mixed.episodes,
            mixed_mean_reward=each.mixed.mean,
        )
        for name, each in sorted(stats.data_sets.items())
    )
