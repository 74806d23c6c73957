"""The contents of the screen as data, computed from the record by one pure function and drawn by the widgets."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bombus.figures import one_line, seconds_between
from bombus.hive import events as ev
from bombus.hive.describe import EventGroup
from bombus.hive.events import HIVE, EpisodeType
from bombus.hive.operations.state import mean_loss
from bombus.hive.state import EngineState, Phase
from bombus.hive.status.data import engine_status, multi_model_claims
from bombus.hive.status.rows import EngineStatus, ModelStatus, MultiModelClaimStatus, OpenEpisode
from bombus.insight.metrics import step_metrics
from bombus.insight.record import SECOND, SECONDS_KEPT, Record
from bombus_overwatch.model import TAIL_SHOWN, EpisodeRecord, HiveView, RunHistory, TailLine

STEPS_DRAWN = 1_024  # evenly spread, and the newest
RATE_S = 30  # seconds that the rates of models are averaged over

# The figures that are shown in fixed places. The others are listed by name, those of the learning first.
REWARD = "reward/mean"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
STALENESS = "age/mean"
MERGED = "trainer/merged_share"
LISTED_FIRST = ("reported/", "policy/", "train/", "trainer/")


class StageState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"


@dataclass(frozen=True)
class StageRow:
    """A boot stage, and how long it took or has taken so far."""

    name: str
    took_s: float
    state: StageState


@dataclass(frozen=True)
class ModelRow:
    """A training client's model. `loss` is per token; `tokens_s` is the rate at which the model is trained."""

    model: ModelStatus
    loss: float | None
    tokens_s: float


@dataclass(frozen=True)
class RewardCurves:
    """Mean rewards: `train` by step, `held_out` by policy version, `now_mean` of the episodes that wait for a batch.

    In an operations run (`by_sampler`), `train` is by saved model, numbered in the order in which their first episodes
    ended, and `now_mean` is that of the newest one. `data_sets` has the mean of each data set for the
    newest version that was evaluated.
    """

    train: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]
    now_mean: float | None
    now_episodes: int
    by_sampler: bool = False
    data_sets: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of training, by step, and the newest step with its figures.

    In an operations run, `model` names the model that the curves belong to; in a run with batches, it is "".
    """

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    last_step: int | None
    metrics: dict[str, float]
    model: str = ""


class Link(StrEnum):
    """The state of the connection through which events arrive."""

    CONNECTING = "connecting"
    CATCHING_UP = "catching up"
    LIVE = "live"
    AWAY = "reconnecting"


@dataclass(frozen=True)
class ViewerState:
    """The state of the viewer, as opposed to the hive. `held` is the position at which the view is held, or None."""

    hive: str
    link: Link = Link.CONNECTING
    why: str = ""
    newest: int = 0
    target: int = 0  # while catching up, the position that was newest at the start
    held: int | None = None
    oldest: int = 0  # the earliest position that can be shown


@dataclass(frozen=True)
class Screen:
    """Everything that is drawn, at `position`. `engine` is "" until the log names an engine, and `status` then empty.

    `tokens` has the tokens of each of the last seconds, oldest first, and `lost` the episodes that were aborted or
    dropped, by what happened and why.
    """

    position: int
    now_ns: int
    engines: tuple[str, ...]
    engine: str
    status: EngineStatus
    stages: tuple[StageRow, ...]
    episodes: tuple[OpenEpisode | MultiModelClaimStatus, ...]  # the longest idle first
    models: tuple[ModelRow, ...]
    rewards: RewardCurves
    training: TrainingCurves
    tokens: tuple[float, ...]
    tokens_s: float
    episodes_s: float
    lost: tuple[tuple[tuple[str, str], int], ...]
    tail: tuple[TailLine, ...]
    tail_group: EventGroup
    viewer: ViewerState = ViewerState("")


def groups_of(history: RunHistory) -> dict[tuple[str, str], list[EpisodeRecord]]:
    """Return the groups of a run's newest episodes, the newest group first, by where they are and their task."""
    groups: dict[tuple[str, str], list[EpisodeRecord]] = {}
    for record in reversed(history.episodes.values()):
        groups.setdefault((_batch_of(record), record.task), []).insert(0, record)
    return groups


def _batch_of(record: EpisodeRecord) -> str:
    if record.type == EpisodeType.EVAL:
        return f"held-out v{record.version}"
    return f"step {record.step}" if record.step else "no batch"


def engines_of(view: HiveView) -> tuple[str, ...]:
    return tuple(sorted(name for name in view.hive.engines if name != HIVE))


def screen_data(
    record: Record, view: HiveView, now_ns: int, engine: str = "", group: EventGroup = EventGroup.ALL
) -> Screen:
    """Return what to show of `view` at `now_ns` for `engine`, or for the first engine if unknown. The tail shows
    `group`."""
    engines = engines_of(view)
    chosen = engine if engine in engines else next(iter(engines), "")
    state = view.hive.engines.get(chosen) or EngineState(name=chosen)
    history = view.history(chosen)
    now_ns = max(now_ns, view.now_ns)
    status = engine_status(state, now_ns)
    series = record.runs.series.get(f"{chosen}-{state.run}")
    rows = [row for row in series.steps if row.done_seq <= view.position] if series is not None else []
    steps = [(row.step, step_metrics(row)) for row in rows[: -1 : 1 + len(rows) // STEPS_DRAWN] + rows[-1:]]
    tokens_s, episodes_s = view.per_second(chosen, now_ns)
    return Screen(
        position=view.position,
        now_ns=now_ns,
        engines=engines,
        engine=chosen,
        status=status,
        stages=_stages(view, state, history.stages, now_ns),
        episodes=_episodes(view, status, now_ns),
        models=_models(status, history.computed, now_ns),
        rewards=_rewards(state, history, steps),
        training=_of_model(state, history.computed) if status.clients_take_episodes else _of_steps(state, steps),
        tokens=_tokens(view, chosen, now_ns),
        tokens_s=tokens_s,
        episodes_s=episodes_s,
        lost=tuple(sorted(history.lost.items(), key=lambda row: (row[0][0], -row[1], row[0][1]))),
        tail=_tail(view, chosen, group),
        tail_group=group,
    )


def _episodes(view: HiveView, status: EngineStatus, now_ns: int) -> tuple[OpenEpisode | MultiModelClaimStatus, ...]:
    """Return the open single-model episodes of an engine, and the claims of multi-model episodes."""
    single = [episode for episode in status.open_episodes if not episode.partners]
    claims = multi_model_claims(view.hive, now_ns) if len(single) < len(status.open_episodes) else ()
    of_engine = [claim for claim in claims if status.engine in claim.engines]
    return tuple(sorted([*single, *of_engine], key=lambda row: -row.idle_s))


def _stages(
    view: HiveView, engine: EngineState, stages: Sequence[ev.EngineProgressed], now_ns: int
) -> tuple[StageRow, ...]:
    """Return the boot stages. Each stage ends when the next one begins; the last one ends when booting ends."""
    booted = view.last.of(ev.EngineBooted, engine.name)
    if booted is not None and booted.run == engine.run:
        last, end_ns = StageState.DONE, booted.at_ns
    elif engine.phase == Phase.BOOTING:
        last, end_ns = StageState.RUNNING, now_ns
    else:
        last, end_ns = StageState.BROKEN, engine.phase_since_ns
    ends = [*(stage.at_ns for stage in stages), end_ns][1:]
    states = [*(StageState.DONE for _ in ends[1:]), last]
    return tuple(
        StageRow(one_line(stage.stage), seconds_between(stage.at_ns, until_ns), state)
        for stage, until_ns, state in zip(stages, ends, states)
    )


def _rewards(engine: EngineState, history: RunHistory, steps: Sequence[tuple[int, dict[str, float]]]) -> RewardCurves:
    by_sampler = engine.clients_take_episodes
    if by_sampler:
        *done, (_, (episodes, total)) = [*enumerate(history.rewards.values(), 1)] or [(0, (0, 0.0))]
        train = [(number, total / count) for number, (count, total) in done]
    else:
        waiting = [each.reward for each in engine.pool.values()]
        episodes, total = len(waiting), sum(waiting)
        train = [(step, metrics[REWARD]) for step, metrics in steps if REWARD in metrics]
    held_out = {version: stats for version, stats in sorted(engine.evals.items()) if stats.episodes}
    newest = held_out[max(held_out)].data_sets if held_out else {}
    return RewardCurves(
        train=tuple(train),
        held_out=tuple((version, stats.mean) for version, stats in held_out.items()),
        now_mean=total / episodes if episodes else None,
        now_episodes=episodes,
        by_sampler=by_sampler,
        data_sets=tuple((one_line(name), stats.mean) for name, stats in sorted(newest.items()) if stats.episodes),
    )


def _models(
    status: EngineStatus, computed: dict[str, list[ev.OperationCompleted]], now_ns: int
) -> tuple[ModelRow, ...]:
    """Return the existing models, the most recently trained first."""
    rows = () if status.operations is None else status.operations.models
    order = {name: number for number, name in enumerate(computed, 1)}
    return tuple(
        ModelRow(row, mean_loss(row.scored), _trained_per_second(computed.get(row.model, []), now_ns // SECOND))
        for row in sorted(rows, key=lambda row: (-order.get(row.model, 0), row.model))
    )


def _trained_per_second(events: Sequence[ev.OperationCompleted], now: int) -> float:
    """Return how many tokens a model was trained on per second of late, or since its first operation if that is
    less."""
    recent = [event for event in events if 0 <= now - event.at_ns // SECOND < RATE_S]
    lasted = now - events[0].at_ns // SECOND + 1 if events else RATE_S
    return sum(event.metrics.get("tokens", 0.0) for event in recent) / min(RATE_S, max(1, lasted))


def _of_model(engine: EngineState, computed: dict[str, list[ev.OperationCompleted]]) -> TrainingCurves:
    model, events = next(reversed(computed.items()), ("", []))
    losses = (mean_loss(event.metrics) for event in events)
    norms = (event.metrics.get("grad_norm") for event in events)
    return TrainingCurves(
        loss=tuple(loss for loss in losses if loss is not None),
        grad_norm=tuple(norm for norm in norms if norm is not None),
        last_step=None,
        metrics=_merged(engine),
        model=one_line(model),
    )


def _of_steps(engine: EngineState, steps: Sequence[tuple[int, dict[str, float]]]) -> TrainingCurves:
    last_step, metrics = steps[-1] if steps else (None, {})
    return TrainingCurves(
        loss=tuple(each[LOSS] for _, each in steps if LOSS in each),
        grad_norm=tuple(each[GRAD_NORM] for _, each in steps if GRAD_NORM in each),
        last_step=last_step,
        metrics=_merged(engine) | metrics,
    )


def _merged(engine: EngineState) -> dict[str, float]:
    """Return the share of calls that extended an earlier call token for token, if there were any."""
    of_agents = engine.counters.calls - engine.counters.calls_masked
    return {MERGED: engine.counters.calls_merged / of_agents} if of_agents else {}


def _tokens(view: HiveView, engine: str, now_ns: int) -> tuple[float, ...]:
    curve = [0.0] * SECONDS_KEPT
    for load in view.seconds.get(engine, ()):
        if 0 <= (age := now_ns // SECOND - load.second) < SECONDS_KEPT:
            curve[-1 - age] += load.tokens
    return tuple(curve)


def _tail(view: HiveView, engine: str, group: EventGroup) -> tuple[TailLine, ...]:
    """Return the newest events of the engine and of the hive itself, newest last."""
    kept = [line for name in (HIVE, engine) for line in view.tails.get((name, group), ())]
    return tuple(sorted(kept, key=lambda line: line.position)[-TAIL_SHOWN:])
