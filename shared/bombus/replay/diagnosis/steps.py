"""What a diagnosis knows about a run: figures for each step, folded from the run's events. Memory is bounded. Pure."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf, isfinite

import msgspec

from bombus.config.job import RunConfig
from bombus.figures import seconds_between
from bombus.hive import events as ev
from bombus.hive.bounded import trim
from bombus.hive.events import AbortReason, DropReason, EpisodeType
from bombus.hive.fates import Fate
from bombus.hive.records import CallRef, CallStatus
from bombus.hive.rewards import have_signal
from bombus.hive.rollouts import SILENT
from bombus.replay.diagnosis.answers import AnswerFigures
from bombus.replay.diagnosis.statistics import Moments, Spread, mean, median

STEPS_KEPT = 4096  # the newest steps; about 2 kB each
EVALUATED_KEPT = 100_000  # evaluation episodes
EPISODES_KEPT = 50_000  # episodes that are open, or have ended and are not in a batch yet
TASKS_KEPT = 100_000  # tasks that were trained on
NAMES_MAX = 32  # names of clients, data sets or metrics in one step; more are counted together
OTHERS = "(others)"
RECENT = 5  # number of previous steps in which a task counts as repeated
SAMPLED_GROUPS = 4  # groups of each step whose answers are read
NO_FAULT = (AbortReason.ENGINE_STOPPED, AbortReason.SUPERSEDED)


class EvaluatedEpisode(msgspec.Struct, frozen=True, array_like=True):
    """An ended evaluation episode. `seq` is the event that ended it, and `version` the policy version that played."""

    seq: int
    version: int
    task: str
    data_set: str
    reward: float
    is_success: bool | None = None


class SeenEpisode(msgspec.Struct):
    """An episode that is open, or has ended and waits for a batch. A compacted log may lack the episode's claim or
    end."""

    claimed_ns: int
    calls: int = 0
    last_call: CallRef | None = None
    client: str = ""
    seconds: float = 0.0
    outcome: ev.Outcome | None = None


class StepFigures(msgspec.Struct, kw_only=True):
    """The figures of one step: of its batch, of what ended while the batch was collected, and of its training.

    `seq` is the event that sealed the batch, and `done_seq` the event that completed the step, at `done_ns`. `silent`
    has the mean reward of each group without a signal. `clients` and `data_sets` have the mean rewards of the batch's
    groups, since the episodes of a group are similar; `metrics` has what episodes report, such as parts of rewards.
    `lengths` and `verdicts` correlate rewards with completion tokens and with `is_success`. An evaluation episode
    counts towards the first batch sealed after the episode ended. `sampled` has the task, the reward and the last call
    of episodes whose answers can be read.
    """

    step: int = 0
    seq: int = 0
    done_seq: int = 0
    done_ns: int = 0
    rewards: Spread = msgspec.field(default_factory=Spread)
    lowest: float = inf
    highest: float = -inf
    groups: int = 0
    groups_of_one: int = 0
    repeated: int | None = None  # groups whose task was in one of the previous `RECENT` steps, if that many are known
    silent: Spread = msgspec.field(default_factory=Spread)
    lengths: Moments = msgspec.field(default_factory=Moments)
    verdicts: Moments = msgspec.field(default_factory=Moments)
    tokens: Spread = msgspec.field(default_factory=Spread)
    calls: Spread = msgspec.field(default_factory=Spread)  # of each episode
    successes: Spread = msgspec.field(default_factory=Spread)
    clients: dict[str, Spread] = {}
    data_sets: dict[str, Spread] = {}
    metrics: dict[str, Spread] = {}
    failed: int = 0  # episodes with a reward although they failed
    truncated: int = 0  # episodes that used up a budget
    used_up: Counter[str] = msgspec.field(default_factory=Counter)  # by budget: see `FailureKind`
    ended: int = 0
    open: int = 0  # episodes that were open when the batch was sealed
    sampled_tokens: int = 0  # of all calls that were recorded while the batch was collected
    aborted: Counter[str] = msgspec.field(default_factory=Counter)  # keyed by kind of failure ("" if none is reported)
    stale: int = 0  # episodes dropped as too old
    unusable: int = 0  # episodes of the batch whose calls could not be read or trained on
    evaluated: Spread = msgspec.field(default_factory=Spread)
    played: list[EvaluatedEpisode] = []  # for evaluation; only the newest `EVALUATED_KEPT` of a run are kept
    evaluated_known: int = 0  # evaluated episodes whose task was trained on
    median_s: float = 0.0  # median time of the batch's episodes, from claim to end
    slowest_s: float = 0.0
    collecting_s: float = 0.0  # from the granting of claims to the sealing of the batch
    training_s: float = 0.0  # from the sealing of the batch to the completion of the step
    trainer: dict[str, float] = {}
    sampled: list[tuple[str, float, CallRef]] = []
    answers: AnswerFigures = AnswerFigures()


class RunSeries:
    """The steps of one run of an engine. `note` folds the engine's events, in order, and ignores those of other
    engines."""

    def __init__(self, engine: str, run: int, job: RunConfig) -> None:
        self.engine = engine
        self.run = run
        self.job = job
        self.steps: list[StepFigures] = []
        self.evaluated: deque[EvaluatedEpisode] = deque(maxlen=EVALUATED_KEPT)
        self.started_ns = 0
        self.started_seq = 0  # the event that started the run, or 0 if the log no longer has it
        self._collected = StepFigures()  # what ended since the last batch was sealed
        self._sealed: StepFigures | None = None
        self._episodes: dict[str, SeenEpisode] = {}
        self._evaluations: deque[StepFigures] = deque()  # the steps that still have their evaluation episodes
        self._trained_tasks: set[str] = set()
        self._recent: deque[set[str]] = deque(maxlen=RECENT)
        self._sealed_ns = 0
        self._rolling_ns = 0

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.run}"

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        handle = _HANDLERS.get(type(event))
        if handle is not None and event.engine == self.engine and getattr(event, "run", self.run) == self.run:
            handle(self, seq, event)

    def _claim(self, seq: int, event: ev.EpisodeClaimed) -> None:
        for name in event.episodes:
            self._episodes[name] = SeenEpisode(event.at_ns)
        trim(self._episodes, EPISODES_KEPT)

    def _roll(self, seq: int, event: ev.RollingStarted) -> None:
        self._rolling_ns = event.at_ns

    def _note_calls(self, seq: int, event: ev.CallsNoted) -> None:
        for call in event.calls:
            self._collected.sampled_tokens += call.completion_tokens
            episode = self._episodes.get(call.episode)
            if episode and call.status == CallStatus.COMPLETE and not call.late and not call.masked:
                episode.last_call, episode.calls = call.ref, episode.calls + 1

    def _end(self, seq: int, event: ev.EpisodeEnded) -> None:
        row = self._collected
        for outcome in event.outcomes:
            episode = self._episodes.get(outcome.episode)
            if episode is None:
                episode = self._episodes[outcome.episode] = SeenEpisode(event.at_ns)
            if event.type == EpisodeType.EVAL:
                row.evaluated.add(outcome.reward)
                played = EvaluatedEpisode(
                    seq, event.version, outcome.task, outcome.data_set, outcome.reward, outcome.is_success
                )
                self.evaluated.append(played)
                row.played.append(played)
                row.evaluated_known += outcome.task in self._trained_tasks
                del self._episodes[outcome.episode]
                continue
            row.ended += 1
            episode.outcome, episode.client = outcome, event.client
            episode.seconds = seconds_between(episode.claimed_ns, event.at_ns)
        trim(self._episodes, EPISODES_KEPT)

    def _lose(self, seq: int, event: ev.EpisodeAborted | ev.GroupDropped | ev.EpisodesTaken) -> None:
        if isinstance(event, ev.EpisodeAborted) and event.reason not in NO_FAULT:
            self._collected.aborted[event.failed_by or ""] += len(event.episodes)
        elif isinstance(event, ev.GroupDropped) and event.reason == DropReason.STALE:
            self._collected.stale += len(event.episodes)
        for episode in event.episodes:
            self._episodes.pop(episode, None)

    def _seal(self, seq: int, event: ev.BatchReady) -> None:
        row, self._collected = self._collected, StepFigures()
        row.step, row.seq = event.step, seq
        began = max(self._rolling_ns, self._sealed_ns)
        row.collecting_s = seconds_between(began, event.at_ns) if began else 0.0
        self._sealed_ns, self._sealed = event.at_ns, row
        self._keep_played(row)
        seconds: list[float] = []
        if len(self._recent) == RECENT:
            row.repeated = sum(any(group.task in tasks for tasks in self._recent) for group in event.groups)
        self._recent.append({group.task for group in event.groups})
        for group in event.groups:
            if len(self._trained_tasks) < TASKS_KEPT:
                self._trained_tasks.add(group.task)
            seen = [self._episodes.pop(each.episode, None) for each in group.episodes]
            members = [each or SeenEpisode(0) for each in seen]
            if row.groups < SAMPLED_GROUPS:
                calls = [(each.reward, member.last_call) for each, member in zip(group.episodes, members, strict=True)]
                row.sampled += [(group.task, reward, call) for reward, call in calls if call is not None]
            _add_group(row, [each.reward for each in group.episodes], members)
            seconds += [member.seconds for member in members if member.outcome is not None]
        row.median_s, row.slowest_s = median(seconds), max(seconds, default=0.0)
        row.open = sum(each.outcome is None for each in self._episodes.values())

    def _keep_played(self, row: StepFigures) -> None:
        """Keep the evaluation episodes of a step, and forget those of the earliest steps if there are too many."""
        if row.played:
            self._evaluations.append(row)
        while sum(len(each.played) for each in self._evaluations) > EVALUATED_KEPT:
            self._evaluations.popleft().played.clear()

    def _complete(self, seq: int, event: ev.StepCompleted) -> None:
        row, self._sealed = self._sealed, None
        if row is None or row.step != event.step:
            row = StepFigures(step=event.step, seq=seq)
        else:
            row.training_s = seconds_between(self._sealed_ns, event.at_ns)
        row.done_seq, row.done_ns = seq, event.at_ns
        row.trainer = {name: value for name, value in event.metrics.items() if isfinite(value)}
        left_out = {} if event.tokens is None else event.tokens.left_out
        stale = sum(fate == Fate.DROPPED_STALE for fate in left_out.values())
        row.stale, row.unusable = row.stale + stale, len(left_out) - stale
        if not row.groups:
            _add_groups_of_trainer(row)
        self.steps.append(row)
        del self.steps[:-STEPS_KEPT]


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.EpisodeClaimed: RunSeries._claim,
    ev.CallsNoted: RunSeries._note_calls,
    ev.EpisodeEnded: RunSeries._end,
    ev.EpisodeAborted: RunSeries._lose,
    ev.GroupDropped: RunSeries._lose,
    ev.EpisodesTaken: RunSeries._lose,
    ev.RollingStarted: RunSeries._roll,
    ev.BatchReady: RunSeries._seal,
    ev.StepCompleted: RunSeries._complete,
}


def _add_group(row: StepFigures, rewards: Sequence[float], members: Sequence[SeenEpisode]) -> None:
    """Add a group of a batch to the figures of its step."""
    row.lowest, row.highest = min([row.lowest, *rewards]), max([row.highest, *rewards])
    row.groups += 1
    row.rewards.extend(rewards)
    calls = [member.calls for member in members]
    call_rewards = [None if member.outcome is None else member.outcome.call_rewards for member in members]
    if len(rewards) < 2:
        row.groups_of_one += 1
    elif not have_signal(rewards, call_rewards, calls):
        row.silent.add(mean(rewards))
    known = [(member.client, member.outcome) for member in members if member.outcome is not None]
    outcomes = [outcome for _, outcome in known]
    lengths = [outcome.completion_tokens for outcome in outcomes]
    row.calls.extend([member.calls for member in members if member.outcome is not None])
    row.tokens.extend(lengths)
    row.lengths.add_group([outcome.reward for outcome in outcomes], lengths)
    if judged := [outcome for outcome in outcomes if outcome.is_success is not None]:
        successes = [float(bool(outcome.is_success)) for outcome in judged]
        row.successes.extend(successes)
        row.verdicts.add_group([outcome.reward for outcome in judged], successes)
    _add_means(row.clients, [(client, outcome.reward) for client, outcome in known])
    _add_means(row.data_sets, [(outcome.data_set, outcome.reward) for outcome in outcomes])
    for outcome in outcomes:
        reported = outcome.log_metrics
        row.failed += outcome.completion_tokens == 0 or reported.get("agent_failed", 0.0) >= 0.5
        if outcome.failure is not None:
            row.used_up[outcome.failure] += 1
        row.truncated += outcome.failure is not None or reported.get("truncated", 0.0) >= 0.5
        for name, value in reported.items():
            _add(row.metrics, name, value)


def _add_groups_of_trainer(row: StepFigures) -> None:
    """Copy the figures for a batch of rollout groups from the trainer's metrics."""
    count, level, deviation = (row.trainer.get(name, 0.0) for name in ("episodes", "reward_mean", "reward_std"))
    row.rewards = Spread(level * count, int(count), (level * level + deviation * deviation) * count)
    row.groups, silent = (int(row.trainer.get(name, 0.0)) for name in ("groups", SILENT))
    row.silent = Spread(level * silent, silent, level * level * silent)


def _add_means(spreads: dict[str, Spread], rewards: Sequence[tuple[str, float]]) -> None:
    """Add the mean reward for each name among a group's episodes."""
    for name in {name for name, _ in rewards}:
        _add(spreads, name, mean([reward for each, reward in rewards if each == name]))


def _add(spreads: dict[str, Spread], name: str, value: float) -> None:
    if name not in spreads and len(spreads) >= NAMES_MAX:
        name = OTHERS
    spreads.setdefault(name, Spread()).add(value)
