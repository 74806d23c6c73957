"""The status of a hive as data, as JSON and as text, for `bombus status` and the screen.

All of it is derived from the fold, without a request to any server.
"""

from collections.abc import Sequence

import msgspec

from bombus.hive.checkpoints import where_begun
from bombus.hive.collection import Measure, measures
from bombus.hive.events import AdapterShape, ConversationFormat, EpisodeType, Method, RunKind, TrainerStalled
from bombus.hive.pacing import Pace, last_chances, pace
from bombus.hive.state import EngineState, Episode, EvalStats, Hive, Phase, Replica, engine_of
from bombus.hive.tenants.state import TenantModel, mean_loss
from bombus.hive.trajectories.status import ScoredStatus, scored_lines, scored_status

BAR_CELLS = 24
EPISODES_SHOWN = 12  # in the plain text; the data has all of them
EVALS_SHOWN = 8


class OpenEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An open episode. `idle_s` counts from its last recorded call.

    The coordinator may count less: heartbeats and calls in flight are only in the inbox.
    """

    episode: str
    client: str
    type: EpisodeType
    task: str
    version: int
    calls: int
    completion_tokens: int
    idle_s: float
    limit_s: float
    owner: str = ""  # the name of its client's key
    partners: tuple[str, ...] = ()  # the other episodes of its joint episode, on other engines


class JointClaimStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of joint episodes, those that are open: `episodes` has the names of each, in the order of `engines`.

    The figures are those of all their engines. `idle_s` is that of the joint episode that is idle longest, and counts
    from the last recorded call of any of its parts: activity of one is activity of all.
    """

    engines: tuple[str, ...]
    episodes: tuple[tuple[str, ...], ...]
    client: str
    type: EpisodeType
    task: str
    calls: int
    completion_tokens: int
    idle_s: float
    limit_s: float
    owner: str = ""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    url: str
    capacity: int
    run: int
    version: int  # -1: nothing loaded
    current: bool  # serves the newest weights of this run
    sequence_tokens: int = 0  # the longest sequence that it serves, 0 where it does not say
    constrains: bool = False  # whether it can hold answers to a form
    quarantined: str = ""  # why it gets no calls, and nothing waits for it


class FormatStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which the model of the run is read, and the first gateway that reported it."""

    gateway: str
    format: ConversationFormat


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    trainer: str  # "" before one has opened the run
    epoch: int
    step_in_flight: int | None  # sealed, not yet completed
    step_since_ns: int
    groups: int
    episodes: int
    failures: int  # of the step in flight
    absence: str = ""  # since when and why there is no trainer, after the last one has stalled


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    at_ns: int
    metrics: dict[str, float]


class DataSetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation on one data set. `mixed` episodes are in none of the other figures: see `EvalStatus`."""

    data_set: str
    episodes: int
    mean_reward: float
    success_rate: float
    mixed: int
    mixed_mean_reward: float


class EvalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of one policy version, which has sampled every token of `episodes`.

    `mixed` episodes were claimed at this version, and have tokens of later ones too. `data_sets` are those that
    clients have named, which need not be all.
    """

    version: int
    episodes: int
    mean_reward: float
    success_rate: float
    mixed: int = 0
    mixed_mean_reward: float = 0.0
    data_sets: tuple[DataSetStatus, ...] = ()


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model of a client of training operations. `step` counts its optimizer steps."""

    model: str
    session: str
    owner: str
    base: str
    adapter: AdapterShape | None
    step: int
    waiting: int
    executed: int
    covered: int  # the last operation that need not be executed again
    idle_s: float  # since an operation was accepted or executed
    last_op: str = ""  # that was executed
    last_failed: bool = False
    scored: dict[str, float] = {}  # the metrics of the newest forward_backward that succeeded
    stepped: dict[str, float] = {}  # and of the newest optim_step


class OperationsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has to do with training operations: totals, and the models that are there now."""

    sessions: int
    models: tuple[ModelStatus, ...]  # those that are open
    accepted: int
    waiting: int
    executed: int
    failed: int
    held_bytes: int  # of operations that a trainer may still have to read
    result_bytes: int
    saved: int  # models that were saved for their clients


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    phase: Phase
    phase_s: float
    detail: str
    failure: str  # why the last run ended, "" when it did not fail
    suspended: str = ""  # why the run waits for its operator, "" while it goes on
    until_served: bool = False  # it also goes on by itself, once a replica serves its weights
    model: str
    run: int
    begun: str = ""  # where the run began, "" where it had no checkpoint to begin at
    global_step: int
    version: int
    method: Method
    progress: tuple[Measure, ...]
    pool_episodes: int
    pool_bytes: int
    open_episodes: tuple[OpenEpisode, ...]  # the longest idle first
    replicas: tuple[ReplicaStatus, ...]
    trainer: TrainerStatus
    last_step: StepStatus | None
    evals: tuple[EvalStatus, ...]  # by version, ascending
    pace: Pace | None = None  # None: the run is synchronous, or there is none
    formats: tuple[FormatStatus, ...] = ()  # empty until a gateway has read the model of the run
    disagreement: str = ""  # between gateways that read the model of the run in different ways
    run_kind: RunKind = RunKind.EPISODES
    operations: OperationsStatus | None = None  # None: there never was one
    taken: int = 0  # ended episodes of a run of operations that their clients have taken
    scored: ScoredStatus | None = None  # None: it has no scored groups, and no trainer for them


class HiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    now_ns: int
    engines: tuple[EngineStatus, ...]
    joint: tuple[JointClaimStatus, ...] = ()  # the longest idle first
    refusing: str = ""  # why no new work is taken
    set_aside: tuple[str, ...] = ()  # the newest messages that could not be decided: a fault of bombus
    uncompacted: str = ""  # why the log is longer than it should be


# ---- the data ----------------------------------------------------------------------------------------------


def seconds_between(start_ns: int, end_ns: int) -> float:
    """Return the seconds between two times, never negative: the clocks of two machines may differ."""
    return max(0, end_ns - start_ns) / 1e9


def detail_of(engine: EngineState, now_ns: int) -> str:
    """Return a clause about what the engine waits for in its phase, or why its run is suspended or has no trainer."""
    if engine.suspended:
        return f"suspended: {engine.suspended}"
    return "; ".join(filter(None, (_phase_detail(engine, now_ns), no_trainer(engine, now_ns))))


def no_trainer(engine: EngineState, now_ns: int) -> str:
    """Return for how long and why a run has had no trainer, "" when it has one, or had none yet."""
    if engine.phase == Phase.OFFLINE or engine.stalled is None:
        return ""
    since = duration(seconds_between(engine.stalled.at_ns, now_ns))
    return f"no trainer for {since}: {stall_text(engine.stalled)}"


def stall_text(stalled: TrainerStalled) -> str:
    at = f" at {stalled.doing}" if stalled.doing else ""
    how = "was not heard from" if stalled.silent else "made no progress"
    return f"{stalled.trainer} {how}{at} for {duration(stalled.still_s)}"


def _phase_detail(engine: EngineState, now_ns: int) -> str:
    match engine.phase:
        case Phase.OFFLINE:
            if engine.failure:
                return "the last run failed"
            if engine.run:
                return "stopped"
            return "configured, waiting for start" if engine.configured else "waiting for a configuration"
        case Phase.BOOTING:
            return engine.stage or "booting"
        case Phase.ROLLING:
            return _rolling_detail(engine, now_ns)
        case Phase.ROLLING_POST:
            return f"waiting for {len(engine.open)} running episodes to finish"
        case Phase.WEIGHT_SYNCING:
            if engine.batch is not None:
                return f"training step {engine.batch.step}"
            loaded = f"{len(engine.loaded)} of {len(engine.usable)} replicas"
            apart = len(engine.replicas) - len(engine.usable)
            return f"loading version {engine.version}: {loaded}" + (f", {apart} quarantined" if apart else "")


def _rolling_detail(engine: EngineState, now_ns: int) -> str:
    if engine.serves_operations:
        models, waiting = len(engine.tenants.open_models), engine.tenants.waiting
        asleep = ""
        if engine.rest_wanted:
            since = duration(seconds_between(engine.rest_since_ns, now_ns))
            asleep = f"asleep for {since}: nothing is executed and no session ends until /wake_up; "
        episodes = f", {_counted(len(engine.open), 'episode')} running" if engine.open else ""
        return f"{asleep}serving {_counted(models, 'model')}, {_counted(waiting, 'operation')} waiting{episodes}"
    if engine.takes_trajectories:
        queue = engine.trajectories.queue
        queued = f"{_counted(len(queue.groups), 'scored group')} for batches of {queue.batch_size} sequences"
        episodes = f", {_counted(len(engine.open), 'episode')} running" if engine.open else ""
        if (now := pace(engine)) is not None and now.waits:
            episodes += f"; new episodes wait: {now.waits}"
        if engine.trains_scored:
            return queued + (f", step {engine.batch.step} training" if engine.batch else "") + episodes
        return f"{queued} of an outside trainer{episodes}"
    waited_for = next(measure for measure in measures(engine, now_ns) if measure.decides)
    text = f"{waited_for.done} of {waited_for.target} {waited_for.name}"
    if engine.batch:
        text += f", step {engine.batch.step} training"
    return text + _asynchronous(engine, waited_for)


def _asynchronous(engine: EngineState, waited_for: Measure) -> str:
    """Return what an asynchronous run waits for besides the next batch."""
    now = pace(engine)
    if now is None:
        return ""
    text = ""
    trains = engine.version < engine.step
    if not trains and waited_for.done >= waited_for.target and (last := last_chances(engine)):
        text = f", waiting for {last} running episodes that would be too old for the batch after it"
    return f"{text}; new episodes wait: {now.waits}" if now.waits else text


def noting(detail: str, refusing: str) -> str:
    """Return an engine's detail with the reason why the hive takes no new work, if any."""
    return f"{detail}. No new work is taken: {refusing}" if refusing else detail


def format_text(found: ConversationFormat) -> str:
    return f"template {found.template}, tool calls: {found.tool_calls}, reasoning: {found.reasoning}"


def disagreement_of(formats: Sequence[FormatStatus]) -> str:
    """Return a sentence about gateways that read the model of a run in different ways, "" while they agree."""
    if len(formats) < 2:
        return ""
    ways = "; ".join(f"{row.gateway} has {format_text(row.format)}" for row in formats)
    return (
        f"gateways have read the model of this run in {len(formats)} ways: {ways}. "
        "Install the same versions of bombus, jinja2 and tokenizers for each of them, then start the engine again."
    )


def _open_episode(episode: Episode, now_ns: int) -> OpenEpisode:
    return OpenEpisode(
        episode=episode.id,
        client=episode.client,
        type=episode.type,
        task=episode.task_hint,
        version=episode.version,
        calls=len(episode.calls),
        completion_tokens=sum(call.completion_tokens for call in episode.calls),
        idle_s=seconds_between(max(episode.claimed_ns, episode.last_call_ns), now_ns),
        limit_s=episode.discard_timeout_s,
        owner=episode.owner,
        partners=tuple(name for _, name in sorted(episode.partners.items())),
    )


def joint_claims(hive: Hive, now_ns: int) -> tuple[JointClaimStatus, ...]:
    """Return the claims of open joint episodes, the longest idle first."""
    found: dict[tuple[str, tuple[str, ...]], list[list[Episode]]] = {}
    for name, engine in sorted(hive.engines.items()):
        for episode in engine.open.values():
            if episode.partners and name < min(episode.partners):  # each is found once, at its first engine
                parts = [episode, *sorted(hive.partners(episode), key=lambda part: engine_of(part.id))]
                engines = tuple(engine_of(part.id) for part in parts)
                found.setdefault((episode.claim, engines), []).append(parts)
    rows = (_joint_claim(engines, episodes, now_ns) for (_, engines), episodes in found.items())
    return tuple(sorted(rows, key=lambda row: (-row.idle_s, row.episodes)))


def _joint_claim(engines: tuple[str, ...], episodes: list[list[Episode]], now_ns: int) -> JointClaimStatus:
    first = episodes[0][0]
    active_ns = [max(max(part.claimed_ns, part.last_call_ns) for part in parts) for parts in episodes]
    calls = [call for parts in episodes for part in parts for call in part.calls]
    return JointClaimStatus(
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


def _quarantine(replica: Replica) -> str:
    found = replica.quarantined
    return "" if found is None else f"it cannot load version {found.version}: {found.reason}"


def _last_step(engine: EngineState) -> StepStatus | None:
    """Return the newest step that this run has made itself: the one that it began at was made by another."""
    done = engine.step_done
    if done is None or done.run != engine.run:
        return None
    return StepStatus(step=done.step, at_ns=done.at_ns, metrics=done.metrics)


def _replicas(engine: EngineState) -> tuple[ReplicaStatus, ...]:
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
            quarantined=_quarantine(replica),
        )
        for name, replica in sorted(engine.replicas.items())
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _model_status(engine: EngineState, model: TenantModel, now_ns: int) -> ModelStatus:
    session = engine.tenants.sessions.get(model.session)
    return ModelStatus(
        model=model.name,
        session=model.session,
        owner="" if session is None else session.owner,
        base=model.base,
        adapter=model.adapter,
        step=model.step,
        waiting=model.waiting,
        executed=model.executed,
        covered=model.covered,
        idle_s=seconds_between(model.last_ns, now_ns),
        last_op=model.last_op,
        last_failed=model.last_failed,
        scored=model.scored,
        stepped=model.stepped,
    )


def _operations(engine: EngineState, now_ns: int) -> OperationsStatus | None:
    tenants = engine.tenants
    if not (tenants.accepted or tenants.sessions):
        return None
    return OperationsStatus(
        sessions=sum(session.ended is None for session in tenants.sessions.values()),
        models=tuple(_model_status(engine, model, now_ns) for model in tenants.open_models),
        accepted=tenants.accepted,
        waiting=tenants.waiting,
        executed=tenants.executed,
        failed=tenants.failed,
        held_bytes=tenants.held_bytes,
        result_bytes=tenants.result_bytes,
        saved=len(tenants.kept),
    )


def engine_status(engine: EngineState, now_ns: int, refusing: str = "") -> EngineStatus:
    """Return the status of an engine; `refusing` is the hive's.

    `now_ns` is the caller's time: the time of the fold stands still while there are no events.
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
        run_kind=engine.run_kind,
        operations=_operations(engine, now_ns),
        taken=engine.counters.taken,
        scored=scored_status(engine.trajectories, engine.trains_scored),
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
        joint=joint_claims(hive, now_ns),
        refusing=hive.refusing_groups,
        set_aside=aside,
        uncompacted=hive.uncompacted,
    )


def status_dict(hive: Hive, now_ns: int | None = None) -> dict[str, object]:
    """Return `hive_status` as plain JSON values. A number that is not finite becomes null."""
    encoded = msgspec.json.encode(hive_status(hive, now_ns))
    return msgspec.json.decode(encoded, type=dict[str, object])


# ---- the plain text ----------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format a duration in at most two units: `4.2 s`, `3 m 05 s`, `7 h 12 m`, `3 d 04 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} m {total % 60:02d} s"
    if total < 86_400:
        return f"{total // 3600} h {total % 3600 // 60:02d} m"
    return f"{total // 86_400} d {total % 86_400 // 3600:02d} h"


def byte_size(size: int) -> str:
    """Format a number of bytes in units of a thousand: `512 B`, `43 kB`, `1.2 MB`, `988 MB`."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.1f} {unit}" if value < 9.95 and unit not in ("B", "kB") else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def one_line(text: str) -> str:
    """Make text from outside safe for a terminal: one line, no control or escape characters."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _bar(measure: Measure) -> str:
    filled = min(BAR_CELLS, BAR_CELLS * measure.done // measure.target)
    return "[" + "#" * filled + "." * (BAR_CELLS - filled) + "]"


def _measure_line(measure: Measure) -> str:
    mark = "*" if measure.decides else " "
    if not measure.target:
        return f"  {mark} {measure.name:<16} {measure.done}"
    return f"  {mark} {measure.name:<16} {_bar(measure)} {measure.done}/{measure.target}"


def _pace_lines(now: Pace | None) -> list[str]:
    if now is None:
        return []
    ahead = f"{now.unfinished} unfinished and {now.sealable} sealable batches, bound {now.max_staleness}"
    return [f"  ahead of training: {ahead}{', new episodes wait' if now.waits else ''}"]


def _episode_lines(running: tuple[OpenEpisode, ...]) -> list[str]:
    """Return a line for each episode but those of joint ones, which have one for all of their engines."""
    episodes = [row for row in running if not row.partners]
    joint = len(running) - len(episodes)
    lines = [f"  {joint} of them are parts of joint episodes, which are listed below"] if joint else []
    return lines + _claim_rows("episode", "", [(one_line(row.episode), "", row) for row in episodes], "more")


def _joint_lines(claims: Sequence[JointClaimStatus]) -> list[str]:
    """Return a line for each claim of joint episodes."""
    if not claims:
        return []
    count = _counted(sum(len(row.episodes) for row in claims), "joint episode")
    rows = [(" + ".join(row.engines), f"{len(row.episodes):>6}", row) for row in claims]
    return [f"{count} of {_counted(len(claims), 'claim')}:", *_claim_rows("engines", " joint", rows, "more claims")]


def _claim_rows(
    name: str, column: str, rows: Sequence[tuple[str, str, OpenEpisode | JointClaimStatus]], more: str
) -> list[str]:
    """Return a table of what clients have claimed, each with its name and the text of a column of its own."""
    if not rows:
        return []
    lines = [f"  {name:<20} {'client':<16} {'type':<5}{column} {'calls':>5} {'idle s':>8} {'limit s':>8}"]
    lines += [
        f"  {named:<20} {one_line(row.owner or row.client)[:16]:<16} {row.type:<5}{own} {row.calls:>5} "
        f"{row.idle_s:>8.1f} {row.limit_s:>8.0f}"
        for named, own, row in rows[:EPISODES_SHOWN]
    ]
    return lines + ([f"  and {len(rows) - EPISODES_SHOWN} {more}"] if len(rows) > EPISODES_SHOWN else [])


def way_on(status: EngineStatus) -> str:
    """Return what lets a suspended run go on."""
    if status.until_served:
        return "the run goes on once a replica serves its weights; `bombus resume` lets all of them try at once"
    return "once the cause is gone, `bombus resume` lets the run go on"


def _head_lines(status: EngineStatus) -> list[str]:
    phase = status.phase.removeprefix("ENGINE.")
    version = status.version if status.version >= 0 else "-"
    since = f" for {duration(status.phase_s)}" if status.run else ""  # before its first run nobody knows
    lines = [f"engine {status.engine}: {phase}{since} ({one_line(status.detail)})"]
    if status.failure:
        lines.append(f"  failure: {one_line(status.failure)}")
    if status.suspended:
        lines.append(f"  {way_on(status)}; `bombus stop` ends it")
    model = one_line(status.model) or "-"
    lines.append(f"  model {model}, run {status.run}, step {status.global_step}, policy version {version}")
    if status.begun:
        lines.append(f"  begun {one_line(status.begun)}")
    if status.disagreement:
        lines.append(f"  warning: {one_line(status.disagreement)}")
    elif status.formats:
        lines.append(f"  {one_line(format_text(status.formats[0].format))}")
    return lines


def _collection_lines(status: EngineStatus) -> list[str]:
    return [
        f"collection: {status.method}",
        *(_measure_line(measure) for measure in status.progress),
        f"  pool: {status.pool_episodes} episodes, {byte_size(status.pool_bytes)}",
        *_pace_lines(status.pace),
        f"running episodes: {len(status.open_episodes)}",
        *_episode_lines(status.open_episodes),
    ]


def _operation_lines(found: OperationsStatus | None) -> list[str]:
    if found is None:
        return []
    head = f"operations: {found.waiting} waiting, {found.executed} executed, {found.failed} failed"
    lines = [f"{head}; {_counted(found.sessions, 'session')}, {_counted(found.saved, 'saved model')}"]
    for row in found.models[:EPISODES_SHOWN]:
        adapter = "all weights" if row.adapter is None else f"rank {row.adapter.rank}"
        lines.append(
            f"  {one_line(row.model):<28} {adapter:<12} step {row.step:>6} {row.waiting:>5} waiting "
            f"{row.executed:>7} executed, idle {duration(row.idle_s)}"
        )
        if figures := _figures(row):
            lines.append(f"    {figures}")
    if len(found.models) > EPISODES_SHOWN:
        lines.append(f"  and {len(found.models) - EPISODES_SHOWN} more")
    return lines


def _figures(row: ModelStatus) -> str:
    """Return what the newest operations of a model have computed."""
    parts = [f"{row.last_op} failed" if row.last_failed else ""]
    if (loss := mean_loss(row.scored)) is not None:
        parts.append(f"loss {loss:.6g} for each of {row.scored['tokens']:.0f} tokens")
    if "grad_norm" in row.stepped:
        parts.append(f"gradient's norm {row.stepped['grad_norm']:.6g}")
    return ", ".join(filter(None, parts))


def _taken_lines(status: EngineStatus) -> list[str]:
    """Return what a run of operations has of episodes, nothing where it never had any."""
    if not (status.open_episodes or status.pool_episodes or status.taken):
        return []
    ended = f"{status.pool_episodes} ended that wait to be taken ({byte_size(status.pool_bytes)}), {status.taken} taken"
    return [f"episodes: {len(status.open_episodes)} running, {ended}", *_episode_lines(status.open_episodes)]


def _replica_lines(replicas: tuple[ReplicaStatus, ...]) -> list[str]:
    apart = sum(bool(replica.quarantined) for replica in replicas)
    lines = [f"replicas: {len(replicas)}" + (f", {apart} of them quarantined" if apart else "")]
    for replica in replicas:
        version = f"version {replica.version}" if replica.version >= 0 else "nothing loaded"
        if replica.sequence_tokens:
            version += f", sequences of up to {replica.sequence_tokens} tokens"
        if replica.constrains:
            version += ", holds answers to a form"
        lines.append(f"  {one_line(replica.replica)} {one_line(replica.url)} {version}")
        if replica.quarantined:
            lines.append(f"    quarantined: {one_line(replica.quarantined)}")
    return lines


def _training_lines(status: EngineStatus, now_ns: int) -> list[str]:
    trainer = status.trainer
    name = one_line(trainer.absence or trainer.trainer) or "-"
    lines = [f"trainer: {name}, epoch {trainer.epoch}"]
    if trainer.step_in_flight is not None:
        since = duration(seconds_between(trainer.step_since_ns, now_ns))
        failures = f", failed {trainer.failures} times" if trainer.failures else ""
        size = f"{trainer.groups} groups, {trainer.episodes} episodes"
        lines.append(f"  step {trainer.step_in_flight} in flight for {since}: {size}{failures}")
    if status.last_step is not None:
        ago = duration(seconds_between(status.last_step.at_ns, now_ns))
        lines.append(f"last step: {status.last_step.step}, {ago} ago")
        lines += [f"  {one_line(name)} {value:.6g}" for name, value in sorted(status.last_step.metrics.items())]
    if status.evals:
        lines.append("held-out reward by policy version:")
        for row in status.evals[-EVALS_SHOWN:]:
            lines.append(f"  {row.version:>5}  {_eval_figures(row)}")
            lines += [f"         {_eval_figures(each, one_line(each.data_set))}" for each in row.data_sets]
    return lines


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


def _eval_figures(row: EvalStatus | DataSetStatus, name: str = "") -> str:
    """Return the mean of what one version has sampled alone, and beside it that of what several have."""
    mean = f"{row.mean_reward:.3f}" if row.episodes else "-"
    mixed = f"; {row.mixed} partly by a later version: {row.mixed_mean_reward:.3f}" if row.mixed else ""
    named = f"{name} " if name else ""
    return f"{mean:<5}  {named}({row.episodes} episodes{mixed})"


def _indented_line(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" "))] + one_line(text.lstrip(" "))


def _engine_text(status: EngineStatus, now_ns: int) -> str:
    lines = _head_lines(status) + _operation_lines(status.operations)
    if status.scored is not None:
        lines += map(_indented_line, scored_lines(status.scored))
    if status.run_kind == RunKind.EPISODES:
        lines += _collection_lines(status)
    elif status.run_kind == RunKind.OPERATIONS:
        lines += _taken_lines(status)
    else:
        lines += _pace_lines(status.pace)
        if status.scored is None or not status.scored.ours:  # without replicas or a trainer of ours
            return "\n".join(lines)
    return "\n".join(lines + _replica_lines(status.replicas) + _training_lines(status, now_ns))


def render_status(hive: Hive, engine: str = "", now_ns: int | None = None) -> str:
    """Return the status of one engine, or of all when `engine` is "", as text that ends with a newline."""
    status = hive_status(hive, now_ns)
    chosen = [row for row in status.engines if engine in ("", row.engine)]
    if not chosen:
        known = ", ".join(row.engine for row in status.engines) or "none"
        return f"no engine {engine!r} on this hive; known engines: {known}\n" if engine else "no engine yet\n"
    alarms = [
        f"warning: a message could not be decided and was set aside, please report it: {one_line(why)}\n"
        for why in status.set_aside
    ]
    if status.uncompacted:
        alarms.append(f"warning: the log could not be compacted: {one_line(status.uncompacted)}\n")
    parts = [_engine_text(row, status.now_ns) for row in chosen]
    if joint := _joint_lines([row for row in status.joint if engine in ("", *row.engines)]):
        parts.append("\n".join(joint))
    return "\n\n".join(parts) + "\n" + "".join(alarms)
