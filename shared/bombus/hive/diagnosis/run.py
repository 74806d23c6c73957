"""What a diagnosis knows of a run: figures of each step, folded from its events. Its memory is bounded."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from bombus.hive import events as ev
from bombus.hive.diagnosis.answers import AnswerFigures, SampledAnswer, figures_of
from bombus.hive.diagnosis.statistics import Moments, Spread, mean, median
from bombus.hive.events import EpisodeType
from bombus.hive.records import CallRef, CallStatus
from bombus.hive.rewards import differ

STEPS_KEPT = 4096  # the newest; about 2 kB each
EPISODES_KEPT = 50_000  # ended, and not in a batch yet
TASKS_KEPT = 100_000  # that were trained on
NAMES_MAX = 32  # of clients, of data sets, and of metrics of one step; more are counted together
OTHERS = "(others)"
SAMPLED_GROUPS = 4  # of each step, whose answers are read
REWARD_PART = "reward/"  # the prefix of metrics that are parts of the reward


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job that rules compare with what has happened."""

    num_repeat: int = 4
    max_staleness: int = 0
    max_response_length: int = 0
    compares_over_batch: bool = False  # the estimator needs no groups
    lr: float = 1e-6
    usual_lr: float = 1e-6  # the default for what the job trains: all weights, or an adapter
    warmup_steps: int = 0
    grad_clip: float = 1.0
    sums_gradients: bool = False  # the loss is a sum, so that clipping is normal
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


class WaitingEpisode(msgspec.Struct, frozen=True):
    """What is known of an episode that waits for a batch."""

    outcome: ev.Outcome
    client: str
    seconds: float
    last_call: CallRef | None

    @property
    def failed(self) -> bool:
        """Return whether it has a reward although its agent never called the model, or says that it failed."""
        return self.outcome.completion_tokens == 0 or self.outcome.log_metrics.get("agent_failed", 0.0) >= 0.5


class ReadableCall(msgspec.Struct, frozen=True):
    """An episode of a step whose last call can be read."""

    task: str
    reward: float
    call: CallRef


class StepFigures(msgspec.Struct, kw_only=True):
    """The figures of one step: of its batch, of what ended while it was collected, and of its training.

    `seq` is the event that sealed its batch. `clients` and `data_sets` have the mean rewards of the batch's groups,
    since the episodes of a group are alike; `metrics` has what episodes report, such as parts of rewards. `lengths` and
    `verdicts` correlate rewards with completion tokens and with `is_success`. Evaluation episodes count for the batch
    before which they ended.
    """

    step: int = 0
    seq: int = 0
    rewards: Spread = msgspec.field(default_factory=Spread)
    lowest: float = 0.0
    highest: float = 0.0
    groups: int = 0
    groups_of_one: int = 0
    groups_silent: int = 0  # of several episodes, whose rewards do not differ
    silent_rewards: Spread = msgspec.field(default_factory=Spread)
    group_deviations: Spread = msgspec.field(default_factory=Spread)  # of groups that are not silent
    lengths: Moments = msgspec.field(default_factory=Moments)
    verdicts: Moments = msgspec.field(default_factory=Moments)
    tokens: Spread = msgspec.field(default_factory=Spread)
    successes: Spread = msgspec.field(default_factory=Spread)
    clients: dict[str, Spread] = {}
    data_sets: dict[str, Spread] = {}
    metrics: dict[str, Spread] = {}
    failed: Spread = msgspec.field(default_factory=Spread)  # the rewards of episodes that failed
    ended: int = 0
    aborted: dict[str, int] = {}
    dropped: dict[str, int] = {}
    evaluated: Spread = msgspec.field(default_factory=Spread)
    evaluated_known: int = 0  # of those evaluated, whose task was trained on
    median_s: float = 0.0  # of the batch's episodes, from claim to end
    slowest_s: float = 0.0
    collecting_s: float = 0.0  # from the moment at which claims were granted until the batch was sealed
    training_s: float = 0.0  # from there until the step was completed
    trainer: dict[str, float] = {}
    sampled: tuple[ReadableCall, ...] = ()
    answers: AnswerFigures | None = None

    def parts(self) -> dict[str, Spread]:
        """Return the parts of the reward by name."""
        return {name: each for name, each in self.metrics.items() if name.startswith(REWARD_PART)}


class RunSeries:
    """The steps of one run of an engine. `note` folds its events, in order; events of other engines are ignored."""

    def __init__(self, engine: str, run: int, settings: JobSettings) -> None:
        self.engine = engine
        self.run = run
        self.settings = settings
        self.steps: list[StepFigures] = []
        self._collected = StepFigures()  # what ended since the last batch was sealed
        self._sealed: StepFigures | None = None
        self._claimed_ns: dict[str, int] = {}
        self._last_calls: dict[str, CallRef] = {}
        self._ended: dict[str, WaitingEpisode] = {}
        self._trained_tasks: set[int] = set()  # hashes
        self._sealed_ns = 0
        self._rolling_ns = 0

    def note(self, seq: int, event: ev.AnyEvent) -> None:
        if event.engine != self.engine or getattr(event, "run", self.run) != self.run:
            return
        match event:
            case ev.EpisodeClaimed():
                self._claimed_ns |= dict.fromkeys(event.episodes, event.at_ns)
            case ev.CallsNoted():
                self._note_calls(event.calls)
            case ev.EpisodeEnded():
                self._note_ended(event)
            case ev.EpisodeAborted() | ev.GroupDropped() | ev.EpisodesTaken():
                self._note_lost(event)
            case ev.RollingStarted():
                self._rolling_ns = event.at_ns
            case ev.BatchReady():
                self._seal(seq, event)
            case ev.StepCompleted():
                self._complete(seq, event)

    def note_answers(self, figures: StepFigures, answers: Iterable[SampledAnswer]) -> None:
        """Add what was read of a step's sampled answers."""
        figures.answers = figures_of(answers)

    def _note_calls(self, calls: Sequence[ev.NotedCall]) -> None:
        for call in calls:
            if call.status == CallStatus.COMPLETE and not call.late and not call.masked:
                self._last_calls[call.episode] = call.ref
        _bound(self._last_calls)

    def _note_ended(self, event: ev.EpisodeEnded) -> None:
        row = self._collected
        for outcome in event.outcomes:
            claimed_ns = self._claimed_ns.pop(outcome.episode, event.at_ns)
            call = self._last_calls.pop(outcome.episode, None)
            if event.type == EpisodeType.EVAL:
                row.evaluated.add(outcome.reward)
                row.evaluated_known += hash(outcome.task) in self._trained_tasks
                continue
            row.ended += 1
            seconds = (event.at_ns - claimed_ns) / 1e9
            self._ended[outcome.episode] = WaitingEpisode(outcome, event.client, seconds, call)
        _bound(self._ended)
        _bound(self._claimed_ns)

    def _note_lost(self, event: ev.EpisodeAborted | ev.GroupDropped | ev.EpisodesTaken) -> None:
        if isinstance(event, ev.EpisodeAborted):
            _count(self._collected.aborted, event.reason, len(event.episodes))
        elif isinstance(event, ev.GroupDropped):
            _count(self._collected.dropped, event.reason, len(event.episodes))
        for episode in event.episodes:
            self._claimed_ns.pop(episode, None)
            self._last_calls.pop(episode, None)
            self._ended.pop(episode, None)

    def _seal(self, seq: int, event: ev.BatchReady) -> None:
        row, self._collected = self._collected, StepFigures()
        row.step, row.seq = event.step, seq
        began = max(self._rolling_ns, self._sealed_ns)
        row.collecting_s = (event.at_ns - began) / 1e9 if began else 0.0
        self._sealed_ns, self._sealed = event.at_ns, row
        seconds: list[float] = []
        sampled: list[ReadableCall] = []
        for number, group in enumerate(event.groups):
            if len(self._trained_tasks) < TASKS_KEPT:
                self._trained_tasks.add(hash(group.task))
            members = [self._ended.pop(each.episode, None) for each in group.episodes]
            known = [member for member in members if member is not None]  # a compacted log may begin after their end
            _add_group(row, [each.reward for each in group.episodes], known)
            seconds += [member.seconds for member in known]
            if number < SAMPLED_GROUPS:
                calls = [(member.outcome.reward, member.last_call) for member in known]
                sampled += [ReadableCall(group.task, reward, call) for reward, call in calls if call is not None]
        row.sampled = tuple(sampled)
        row.median_s, row.slowest_s = median(seconds), max(seconds, default=0.0)

    def _complete(self, seq: int, event: ev.StepCompleted) -> None:
        row, self._sealed = self._sealed, None
        if row is None or row.step != event.step:
            row = StepFigures(step=event.step, seq=seq)
        else:
            row.training_s = (event.at_ns - self._sealed_ns) / 1e9
        row.trainer = dict(event.metrics)
        self.steps.append(row)
        if len(self.steps) > STEPS_KEPT:
            del self.steps[0]


def _add_group(row: StepFigures, rewards: Sequence[float], known: Sequence[WaitingEpisode]) -> None:
    """Add a group of a batch to the figures of its step."""
    row.lowest = min([*rewards, row.lowest if row.groups else rewards[0]])
    row.highest = max([*rewards, row.highest if row.groups else rewards[0]])
    row.groups += 1
    spread = Spread()
    for reward in rewards:
        spread.add(reward)
    row.rewards.include(spread)
    if len(rewards) == 1:
        row.groups_of_one += 1
    elif differ(rewards):
        row.group_deviations.add(spread.deviation)
    else:
        row.groups_silent += 1
        row.silent_rewards.add(spread.mean)
    row.lengths.add_group([(member.outcome.reward, member.outcome.completion_tokens) for member in known])
    judged = [member.outcome for member in known if member.outcome.is_success is not None]
    row.verdicts.add_group([(outcome.reward, float(bool(outcome.is_success))) for outcome in judged])
    for client in {member.client for member in known}:
        _add(row.clients, client, mean([each.outcome.reward for each in known if each.client == client]))
    for data_set in {member.outcome.data_set for member in known}:
        _add(
            row.data_sets, data_set, mean([each.outcome.reward for each in known if each.outcome.data_set == data_set])
        )
    for member in known:
        outcome = member.outcome
        row.tokens.add(outcome.completion_tokens)
        if outcome.is_success is not None:
            row.successes.add(outcome.is_success)
        if member.failed:
            row.failed.add(outcome.reward)
        for name, value in outcome.log_metrics.items():
            _add(row.metrics, name, value)


def _add(spreads: dict[str, Spread], name: str, value: float) -> None:
    if name not in spreads and len(spreads) >= NAMES_MAX:
        name = OTHERS
    spreads.setdefault(name, Spread()).add(value)


def _count(counts: dict[str, int], name: str, number: int) -> None:
    counts[name] = counts.get(name, 0) + number


def _bound(kept: dict[str, CallRef] | dict[str, WaitingEpisode] | dict[str, int]) -> None:
    """Remove the oldest entries beyond the limit."""
    while len(kept) > EPISODES_KEPT:
        del kept[next(iter(kept))]


def totals(rows: Iterable[StepFigures], name: str) -> Counter[str]:
    """Add up one of the counts by reason, `aborted` or `dropped`, over some steps."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(getattr(row, name))
    return found
