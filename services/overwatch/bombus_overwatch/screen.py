"""The contents of the screen as data, computed from the view by one pure function and drawn by the widgets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bombus.figures import one_line, seconds_between
from bombus.hive.describe import EventGroup, line_of, tone_of
from bombus.hive.events import HIVE, EpisodeType
from bombus.hive.operations.state import mean_loss
from bombus.hive.state import EngineState, EvalStats, Phase
from bombus.hive.status.data import engine_status, multi_model_claims
from bombus.hive.status.rows import EngineStatus, ModelStatus, MultiModelClaimStatus, OpenEpisode, TrainerStatus
from bombus_overwatch.model import (
    SECOND,
    EngineHistory,
    EpisodeRecord,
    HiveView,
    LoggedEvent,
    ModelHistory,
    SecondCounts,
    StepCurves,
    StepPoint,
)

TAIL_SHOWN = 200
RATE_S = 30  # seconds that the rates are averaged over
RATE_CURVE_S = 300
NEAR_LIMIT = 0.75  # an episode that has used this share of its idle limit stands out
HALF_LIMIT = 0.5

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
class EpisodeRow:
    """An open episode, or a claim of multi-model episodes.

    For a claim, `episode` names its engines and has the sums over its episodes.
    """

    episode: OpenEpisode
    used: float  # share of its idle limit; 1.0 is the limit
    count: int = 1  # number of episodes on this row

    @property
    def near(self) -> bool:
        return self.used >= NEAR_LIMIT


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
class TrainingSummary:
    """The trainer's state and curves.

    In an operations run, `model` names the model that the curves belong to; in a run with batches, it is "".
    """

    trainer: TrainerStatus
    last_step: int | None
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    staleness: float | None
    merge_share: float | None  # share of calls that extended an earlier call token for token
    others: tuple[tuple[str, float], ...]  # the last step's other figures
    model: str = ""


@dataclass(frozen=True)
class Rates:
    """Means over the last `RATE_S` seconds, and tokens per second over the last `RATE_CURVE_S`, oldest first."""

    tokens_s: float
    episodes_s: float
    tokens_curve: tuple[float, ...]


@dataclass(frozen=True)
class TailRow:
    position: int
    at_ns: int
    text: str
    tone: EventGroup


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
    """Everything that is drawn, at `position`. `status` is None until the log names an engine."""

    position: int
    now_ns: int
    engines: tuple[str, ...]
    engine: str
    status: EngineStatus | None
    stages: tuple[StageRow, ...]
    episodes: tuple[EpisodeRow, ...]
    models: tuple[ModelRow, ...]
    rewards: RewardCurves
    training: TrainingSummary
    rates: Rates
    aborted: tuple[tuple[str, int], ...]
    dropped: tuple[tuple[str, int], ...]
    tail: tuple[TailRow, ...]
    tail_group: EventGroup


@dataclass(frozen=True)
class ShownGroup:
    """Episodes of one task that belong together. `key` is where they are, such as "step 12", and their task."""

    key: tuple[str, str]
    episodes: tuple[EpisodeRecord, ...]

    @property
    def names(self) -> set[str]:
        return {each.episode for each in self.episodes}


def groups_of(history: EngineHistory) -> list[ShownGroup]:
    """Return the groups of a run's newest episodes, the newest group first."""
    groups: dict[tuple[str, str], list[EpisodeRecord]] = {}
    for record in reversed(history.episodes.values()):
        groups.setdefault((_batch_of(record), record.task), []).append(record)
    return [ShownGroup(key, tuple(reversed(episodes))) for key, episodes in groups.items()]


def _batch_of(record: EpisodeRecord) -> str:
    if record.type == EpisodeType.EVAL:
        return f"held-out v{record.version}"
    return f"step {record.step}" if record.step else "no batch"


def engines_of(view: HiveView) -> tuple[str, ...]:
    return tuple(sorted(name for name in view.hive.engines if name != HIVE))


def screen_data(
    view: HiveView, curves: StepCurves, now_ns: int, engine: str = "", group: EventGroup = EventGroup.ALL
) -> Screen:
    """Return what to show at `now_ns` for `engine`, or for the first engine if unknown. The tail shows `group`."""
    engines = engines_of(view)
    chosen = engine if engine in engines else next(iter(engines), "")
    state = view.hive.engines.get(chosen) or EngineState(name=chosen)
    history = view.histories.get(chosen) or EngineHistory()
    now_ns = max(now_ns, view.hive.now_ns)
    status = engine_status(state, now_ns)
    steps = curves.until(view.position, chosen, state.run)
    return Screen(
        position=view.position,
        now_ns=now_ns,
        engines=engines,
        engine=chosen,
        status=status if chosen else None,
        stages=_stages(state, history, now_ns),
        episodes=_episodes(view, status, now_ns),
        models=_models(status, history, now_ns),
        rewards=_rewards(state, history, steps),
        training=_training(state, status, history, steps),
        rates=_window(history.seconds, now_ns // SECOND),
        aborted=_by_count(history.aborted),
        dropped=_by_count(history.dropped),
        tail=_tail(view, chosen, group),
        tail_group=group,
    )


def _episodes(view: HiveView, status: EngineStatus, now_ns: int) -> tuple[EpisodeRow, ...]:
    """Return a row for each open single-model episode of an engine and for each claim of multi-model episodes.

    The rows that have been idle longest come first.
    """
    rows = [_episode_row(episode) for episode in status.open_episodes if not episode.partners]
    claims = multi_model_claims(view.hive, now_ns) if len(rows) < len(status.open_episodes) else ()
    rows += [_multi_model_row(claim) for claim in claims if status.engine in claim.engines]
    return tuple(sorted(rows, key=lambda row: (-row.episode.idle_s, row.episode.episode)))


def _multi_model_row(claim: MultiModelClaimStatus) -> EpisodeRow:
    episode = OpenEpisode(
        episode=f"{len(claim.episodes)} on {'+'.join(claim.engines)}",
        client=claim.client,
        type=claim.type,
        task=claim.task,
        version=-1,  # each engine has its own version
        calls=claim.calls,
        completion_tokens=claim.completion_tokens,
        idle_s=claim.idle_s,
        limit_s=claim.limit_s,
        owner=claim.owner,
    )
    return _episode_row(episode, len(claim.episodes))


def _episode_row(episode: OpenEpisode, count: int = 1) -> EpisodeRow:
    return EpisodeRow(episode, episode.idle_s / episode.limit_s if episode.limit_s > 0 else 0.0, count)


def _stages(engine: EngineState, history: EngineHistory, now_ns: int) -> tuple[StageRow, ...]:
    """Return the boot stages. Each stage ends when the next one begins; the last one ends when booting ends."""
    if history.booted_ns:
        last, end_ns = StageState.DONE, history.booted_ns
    elif engine.phase == Phase.BOOTING:
        last, end_ns = StageState.RUNNING, now_ns
    else:
        last, end_ns = StageState.BROKEN, engine.phase_since_ns
    ends = [*(stage.at_ns for stage in history.stages), end_ns][1:]
    states = [*(StageState.DONE for _ in ends[1:]), last]
    return tuple(
        StageRow(one_line(stage.name), seconds_between(stage.at_ns, until_ns), state)
        for stage, until_ns, state in zip(history.stages, ends, states)
    )


def _rewards(engine: EngineState, history: EngineHistory, steps: Sequence[StepPoint]) -> RewardCurves:
    by_sampler = engine.clients_take_episodes
    if by_sampler:
        current = history.samplers_seen
        now = history.rewards.get(current) or EvalStats()
        done = [(number, stats.mean) for number, stats in sorted(history.rewards.items()) if number < current]
    else:
        waiting = [each.reward for each in engine.pool.values()]
        now = EvalStats(episodes=len(waiting), reward_sum=sum(waiting))
        done = _curve(steps, REWARD)
    held_out = {version: stats for version, stats in sorted(engine.evals.items()) if stats.episodes}
    newest = held_out[max(held_out)].data_sets if held_out else {}
    return RewardCurves(
        train=tuple(done),
        held_out=tuple((version, stats.mean) for version, stats in held_out.items()),
        now_mean=now.mean if now.episodes else None,
        now_episodes=now.episodes,
        by_sampler=by_sampler,
        data_sets=tuple((one_line(name), stats.mean) for name, stats in sorted(newest.items()) if stats.episodes),
    )


def _models(status: EngineStatus, history: EngineHistory, now_ns: int) -> tuple[ModelRow, ...]:
    """Return the existing models, the most recently trained first."""
    if status.operations is None:
        return ()
    order = {name: number for number, name in enumerate(history.models, 1)}
    rows = sorted(status.operations.models, key=lambda row: (-order.get(row.model, 0), row.model))
    empty = ModelHistory()
    return tuple(
        ModelRow(
            row,
            mean_loss(row.scored),
            _window(history.models.get(row.model, empty).seconds, now_ns // SECOND).tokens_s,
        )
        for row in rows
    )


def _curve(steps: Sequence[StepPoint], name: str) -> list[tuple[int, float]]:
    return [(point.step, point.metrics[name]) for point in steps if name in point.metrics]


def _values(steps: Sequence[StepPoint], name: str) -> tuple[float, ...]:
    return tuple(value for _, value in _curve(steps, name))


def _place(name: str) -> tuple[int, str]:
    """Return the place of a figure in the list of figures, for sorting."""
    return next((n for n, start in enumerate(LISTED_FIRST) if name.startswith(start)), len(LISTED_FIRST)), name


def _training(
    engine: EngineState, status: EngineStatus, history: EngineHistory, steps: Sequence[StepPoint]
) -> TrainingSummary:
    metrics = steps[-1].metrics if steps else {}
    counters = engine.counters
    shown = {REWARD, LOSS, GRAD_NORM, STALENESS, MERGED}
    merged = metrics.get(MERGED)
    of_agents = counters.calls - counters.calls_masked
    if merged is None and of_agents:
        merged = counters.calls_merged / of_agents
    model, computed = next(reversed(history.models.items()), ("", ModelHistory()))
    is_of_clients = status.clients_take_episodes
    return TrainingSummary(
        trainer=status.trainer,
        last_step=steps[-1].step if steps else None,
        loss=tuple(computed.losses) if is_of_clients else _values(steps, LOSS),
        grad_norm=tuple(computed.grad_norms) if is_of_clients else _values(steps, GRAD_NORM),
        staleness=metrics.get(STALENESS),
        merge_share=merged,
        others=tuple((one_line(name), metrics[name]) for name in sorted(metrics, key=_place) if name not in shown),
        model=one_line(model) if is_of_clients else "",
    )


def _window(seconds: Sequence[SecondCounts], now: int) -> Rates:
    tokens = episodes = 0
    curve = [0.0] * RATE_CURVE_S
    for entry in seconds:
        age = now - entry.second
        if 0 <= age < RATE_S:
            tokens += entry.tokens
            episodes += entry.episodes
        if 0 <= age < RATE_CURVE_S:
            curve[RATE_CURVE_S - 1 - age] += entry.tokens
    lasted = now - seconds[0].second + 1 if seconds else RATE_S
    window = min(RATE_S, max(1, lasted))  # shorter for a new run, so as not to underestimate its rate
    return Rates(tokens / window, episodes / window, tuple(curve))


def _by_count(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(((str(name), count) for name, count in counts.items()), key=lambda row: (-row[1], row[0])))


def _tail(view: HiveView, engine: str, group: EventGroup) -> tuple[TailRow, ...]:
    """Return the newest events of the engine and of the hive itself, newest last."""
    histories = (view.histories[name] for name in (HIVE, engine) if name in view.histories)
    kept: Iterable[LoggedEvent] = (kept for history in histories for kept in list(history.tails[group])[-TAIL_SHOWN:])
    newest = sorted(kept, key=lambda entry: entry.position)[-TAIL_SHOWN:]
    return tuple(
        TailRow(entry.position, entry.event.at_ns, line_of(entry.event), tone_of(entry.event)) for entry in newest
    )
