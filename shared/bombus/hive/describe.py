"""A one-line description of each kind of event, and its group, for the screen and `bombus replay timeline`."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from bombus.figures import byte_size, one_line
from bombus.hive import events as ev
from bombus.hive.checkpoints import where_begun
from bombus.hive.events import Event
from bombus.hive.status.detail import format_text, lost_text, stall_text

METRICS_SHOWN = 3
E = TypeVar("E", bound=Event)


class EventGroup(StrEnum):
    """A group of events by which the screen can filter. `TROUBLE` overlaps with the other groups."""

    ALL = "all"
    ENGINE = "engine"
    EPISODES = "episodes"
    CALLS = "calls"
    BATCHES = "batches"
    TRAINING = "training"
    WEIGHTS = "weights"
    TROUBLE = "trouble"


class EventKind(NamedTuple):
    group: EventGroup
    text: Callable[[Any], str]
    trouble: bool


KINDS: dict[type[Event], EventKind] = {}  # filled at the end of this file


def line_of(event: Event) -> str:
    """Describe an event in one line that is safe for a terminal. Raises `TypeError` for an unknown kind of event."""
    kind = KINDS.get(type(event))
    if kind is None:
        raise TypeError(f"{type(event).__name__} has no description: add one to describe.py")
    by = getattr(event, "by", "")
    return one_line(kind.text(event) + (f", by {by}" if by else ""))


def tone_of(event: Event) -> EventGroup:
    """Return the group that gives an event's line its colour."""
    kind = KINDS[type(event)]
    return EventGroup.TROUBLE if kind.trouble else kind.group


# ---- descriptions that need more than an expression ---------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _some(names: Iterable[str]) -> str:
    """Return the only name, or the first name and how many more there are."""
    all_names = list(names)
    if not all_names:
        return "nothing"
    return all_names[0] if len(all_names) == 1 else f"{all_names[0]} and {len(all_names) - 1} more"


def _engine_started(event: ev.EngineStarted) -> str:
    if event.base:
        return f"run {event.run} started for training operations on {event.base}"
    if not event.config_digest:
        return f"run {event.run} started for an outside trainer"
    text = f"run {event.run} started with configuration {event.config_digest[:8]}"
    begun = where_begun(event)
    return f"{text}, {begun}" if begun else text


def _episode_claimed(event: ev.EpisodeClaimed) -> str:
    task = f", task {event.task_hint}" if event.task_hint else ""
    weights = "" if event.sampler is None else f", from {event.sampler.checkpoint or 'the base'}"
    multi = f", together with {' and '.join(map(_some, event.partners.values()))}" if event.partners else ""
    return f"{event.client} claimed {_some(event.episodes)} ({event.type}{task}{weights}{multi})"


def _calls_noted(event: ev.CallsNoted) -> str:
    tokens = sum(call.completion_tokens for call in event.calls)
    late = sum(call.late for call in event.calls)
    text = f"{_count(len(event.calls), 'call')}, {_count(tokens, 'token')} sampled"
    return f"{text}, {late} too late to count" if late else text


def _episode_ended(event: ev.EpisodeEnded) -> str:
    if not event.outcomes:
        return f"{event.client} ended nothing"
    mean = sum(outcome.reward for outcome in event.outcomes) / len(event.outcomes)
    kind = "held-out reward" if event.type == ev.EpisodeType.EVAL else "reward"
    tasks = _some(dict.fromkeys(outcome.task for outcome in event.outcomes))
    named = [outcome.data_set for outcome in event.outcomes if outcome.data_set]
    of = f" of {_some(dict.fromkeys(named))}" if named else ""
    return f"{_some(outcome.episode for outcome in event.outcomes)} ended, {kind} {mean:.3f}, task {tasks}{of}"


def _episode_aborted(event: ev.EpisodeAborted) -> str:
    detail = f" ({event.detail})" if event.detail else ""
    return f"{_some(event.episodes)} aborted: {event.failure or event.reason}{detail}"


def _group_dropped(event: ev.GroupDropped) -> str:
    what = f"{_count(len(event.episodes), 'episode')} of {_count(len(event.tasks), 'task')}"
    return f"{what} dropped untrained: {event.reason}"


def _batch_ready(event: ev.BatchReady) -> str:
    if event.taken:
        return f"batch of step {event.step}: {_count(len(event.taken), 'rollout group')}"
    episodes = sum(len(group.episodes) for group in event.groups)
    return f"batch of step {event.step}: {_count(len(event.groups), 'group')}, {_count(episodes, 'episode')}"


def _step_completed(event: ev.StepCompleted) -> str:
    shown = [f"{name} {event.metrics[name]:.4g}" for name in ("loss", "grad_norm") if name in event.metrics]
    left_out = int(event.metrics.get("updates_left_out", 0))
    if left_out:
        shown.append(f"{_count(left_out, 'update')} left out for not being finite")
    groups = int(event.metrics.get("groups_left_out", 0))
    if groups:
        shown.append(f"{_count(groups, 'group')} left out, with advantages that are not finite")
    return ", ".join([f"step {event.step} completed", *shown])


def _weights_ready(event: ev.WeightsReady) -> str:
    weights = event.weights
    changed = f", of which {byte_size(weights.delta_bytes)} changed" if weights.delta_bytes else ""
    return f"version {event.version} is ready, {byte_size(weights.bytes)}{changed}"


def _weights_loaded(event: ev.WeightsLoaded) -> str:
    apart = "" if event.canary is None else f", {event.canary.difference:.1e} nats from the trainer"
    return f"{event.replica} serves version {event.version}{apart}"


def why_quarantined(event: ev.ReplicaQuarantined) -> str:
    what = "its answers are wrong at" if event.answers else "it cannot load"
    return f"{what} version {event.version}: {event.reason}"


def _model_rebuilding(event: ev.ModelRebuilding) -> str:
    if event.over:
        return f"trainer {event.trainer_epoch} has finished rebuilding model {event.model}"
    what = f"re-executes operation {event.number} of {event.model}" if event.number else f"rebuilds model {event.model}"
    return f"trainer {event.trainer_epoch} {what}"


def _operation_accepted(event: ev.OperationAccepted) -> str:
    size = f", {byte_size(event.body.size)}" if event.body is not None else ""
    return f"{event.op} {event.number} of {event.model} accepted{size}"


def _operation_completed(event: ev.OperationCompleted) -> str:
    shown = [f"{name} {value:.4g}" for name, value in sorted(event.metrics.items())[:METRICS_SHOWN]]
    how = "failed" if event.failed else "executed"
    if event.made is not None and event.made.adapter is not None and event.made.adapter.seed is not None:
        shown.append(f"seed {event.made.adapter.seed}")
    return ", ".join([f"{event.op} {event.number} of {event.model} {how}", *shown])


def _weights_kept(event: ev.WeightsKept) -> str:
    saved = event.saved
    if event.saved_ns:
        kept = f"is kept for {saved.ttl_s:.0f} s" if saved.ttl_s else "is kept"
        return f"{saved.name} ({saved.use}) of model {event.model} {kept}" + (", and public" if event.public else "")
    return f"model {event.model} saved as {saved.name} ({saved.use}), {byte_size(saved.size_bytes)}"


def _environment_joined(event: ev.EnvironmentJoined) -> str:
    share = "" if event.minimum is None else f" and requests {event.minimum:.0%} of each batch"
    return f"environment {event.environment} ({event.name}) sends groups of {event.group_size}{share}"


def _groups_pushed(event: ev.GroupsPushed) -> str:
    sequences = sum(group.sequences for group in event.groups)
    tokens = sum(group.tokens for group in event.groups)
    return f"{len(event.groups)} rollout groups of {sequences} sequences and {tokens} tokens"


def _groups_given_up(event: ev.GroupsGivenUp) -> str:
    whose = f" of batch {event.number}" if event.number else ""
    return f"{_groups(len(event.groups))}{whose} given up: {event.why}"


def _groups(count: int) -> str:
    return f"{count} rollout {'group' if count == 1 else 'groups'}"


# ---- all kinds, by their groups -----------------------------------------------------------------------------------


class _Says(NamedTuple):
    """Registers the description of a kind of event that belongs to this group."""

    group: EventGroup

    def __call__(self, kind: type[E], text: Callable[[E], str], *, trouble: bool = False) -> None:
        KINDS[kind] = EventKind(self.group, text, trouble)


_engine = _Says(EventGroup.ENGINE)
_episodes = _Says(EventGroup.EPISODES)
_calls = _Says(EventGroup.CALLS)
_batches = _Says(EventGroup.BATCHES)
_training = _Says(EventGroup.TRAINING)
_weights = _Says(EventGroup.WEIGHTS)

_engine(
    ev.EpochOpened,
    lambda event: (
        f"epoch {event.epoch} opened by {event.leader}" + (f", feature level {event.level}" if event.level > 1 else "")
    ),
)
_engine(
    ev.LeadingPaused,
    lambda event: (
        f"no coordinator led for {(event.at_ns - event.since_ns) / 1e9:.1f} s, which counts toward no deadline"
    ),
)
_engine(ev.StorageFilled, lambda event: f"no room for new work: {event.why}", trouble=True)
_engine(
    ev.LogCompacted,
    lambda event: (
        f"the log now begins at event {event.below:,}" if event.below else "the log no longer needs compacting"
    ),
)
_engine(ev.CompactionFailed, lambda event: f"the log could not be compacted: {event.why}", trouble=True)
_engine(ev.StreamWentBack, lost_text, trouble=True)
_engine(
    ev.MessageDeadLettered,
    lambda event: (
        f"{event.message} {event.id} of {event.about} could not be decided and became a dead letter: {event.why}"
    ),
    trouble=True,
)
_engine(ev.StorageFreed, lambda event: f"free again: {byte_size(event.size - event.used)} of {event.what}")
_engine(
    ev.EngineConfigured,
    lambda event: f"configured: {event.model}, {event.collection.method}, configuration {event.config_digest[:8]}",
)
_engine(ev.EngineStarted, _engine_started)
_engine(ev.CommandAnswered, lambda event: f"command {event.command}: {event.why or 'nothing needed to be done'}")
_engine(ev.EngineProgressed, lambda event: f"boot: {event.stage}")
_engine(ev.EngineBooted, lambda event: f"run {event.run} booted")
_engine(ev.EngineStopped, lambda event: f"run {event.run} stopped")
_engine(ev.EngineFailed, lambda event: f"run {event.run} failed: {event.reason}", trouble=True)
_engine(ev.EngineSuspended, lambda event: f"run {event.run} is suspended: {event.reason}", trouble=True)
_engine(ev.EngineResumed, lambda event: f"run {event.run} resumed")
_engine(ev.ModelRead, lambda event: f"{event.gateway} reads the model with {format_text(event.format)}")
_engine(
    ev.RollingStarted,
    lambda event: f"rolling on version {event.version}" if event.version >= 0 else "rolling, before the first version",
)
_engine(ev.RollingClosed, lambda event: "no new episodes: the batch is complete")
_engine(ev.SyncingStarted, lambda event: "syncing weights")
_engine(ev.SyncAgreed, lambda event: f"{event.client} agrees to sync")
_episodes(ev.EpisodeClaimed, _episode_claimed)
_calls(ev.CallsNoted, _calls_noted)
_episodes(ev.EpisodeEnded, _episode_ended)
_episodes(ev.EpisodeAborted, _episode_aborted, trouble=True)
_batches(ev.GroupDropped, _group_dropped, trouble=True)
_batches(ev.EpisodesTaken, lambda event: f"{event.client} took {_some(event.episodes)}")
_batches(
    ev.PoolCleared,
    lambda event: f"pool cleared: {event.reason}, {_count(event.episodes, 'episode')}, {byte_size(event.bytes)}",
    trouble=True,
)
_batches(ev.BatchReady, _batch_ready)
_training(ev.TrainerOpened, lambda event: f"trainer {event.trainer} opened epoch {event.trainer_epoch}")
_training(ev.TrainerStalled, stall_text, trouble=True)
_training(ev.StepCompleted, _step_completed)
_training(
    ev.StepFailed,
    lambda event: f"step {event.step} failed ({_count(event.failures, 'time')}): {event.reason}",
    trouble=True,
)
_weights(ev.WeightsReady, _weights_ready)
_weights(ev.WeightsLoaded, _weights_loaded)
_weights(ev.ReplicaJoined, lambda event: f"replica {event.replica} joined at {event.url}, room for {event.capacity}")
_weights(
    ev.ReplicaQuarantined,
    lambda event: f"replica {event.replica} is quarantined, {why_quarantined(event)}",
    trouble=True,
)
_weights(
    ev.ReplicaLeft,
    lambda event: f"replica {event.replica} left{': ' + event.reason if event.reason else ''}",
    trouble=True,
)
_engine(
    ev.SessionOpened, lambda event: f"session {event.session} opened" + (f" by {event.owner}" if event.owner else "")
)
_engine(ev.SessionEnded, lambda event: f"session {event.session} ended: {event.detail or event.reason}")
_engine(ev.SessionForgotten, lambda event: f"the results of session {event.session} can no longer be read")
_engine(ev.SamplingBegun, lambda event: f"session {event.session} samples")
_training(ev.ModelOpened, lambda event: f"model {event.model} opened on {event.base}")
_training(ev.ModelClosed, lambda event: f"model {event.model} is gone: {event.why or event.reason}")
_training(
    ev.ModelSuspended,
    lambda event: f"model {event.model} waits: {event.why}" if event.why else f"model {event.model} continues",
)
_training(ev.ModelRebuilding, _model_rebuilding)
_training(ev.OperationAccepted, _operation_accepted)
_training(
    ev.OperationBegun,
    lambda event: f"trainer {event.trainer_epoch} begins operation {event.number} of {event.model}",
)
_training(ev.OperationCompleted, _operation_completed)
_training(ev.ModelCheckpointed, lambda event: f"model {event.model} can continue after operation {event.number}")
_weights(ev.WeightsKept, _weights_kept)
_weights(
    ev.WeightsRemoved,
    lambda event: (
        f"{event.name} ({event.use}) of model {event.model} " + ("has expired" if event.expired else "was removed")
    ),
)
_training(
    ev.TrainerRegistered,
    lambda event: (
        f"trainer {event.trainer[:12]} takes batches of {event.batch_size} sequences, "
        f"from step {event.starting_step} to {event.num_steps}"
    ),
)
_training(ev.BatchesBegun, lambda event: "the trainer has requested its first batch: environments can join")
_engine(ev.EnvironmentJoined, _environment_joined)
_engine(ev.EnvironmentLeft, lambda event: f"environment {event.environment} has left: {event.reason}")
_episodes(ev.GroupsPushed, _groups_pushed)
_batches(ev.BatchHandedOut, lambda event: f"batch {event.number} handed out, of {len(event.groups)} groups")
_batches(ev.BatchDelivered, lambda event: f"batch {event.number} delivered")
_batches(ev.GroupsReset, lambda event: "all rollout groups and environments are forgotten")
_batches(ev.GroupsGivenUp, _groups_given_up, trouble=True)
_engine(ev.BodiesMoved, lambda event: f"the bodies of {_groups(len(event.moved))} still waiting were stored again")
_engine(ev.TrajectoriesReleased, lambda event: f"rollout groups before {event.below} are no longer needed")
_engine(ev.OperationsReleased, lambda event: f"operations before {event.below} are no longer needed")
_weights(
    ev.EndpointAdded,
    lambda event: f"the inference server at {event.host}:{event.port} gets synced weights",
)
_weights(ev.EndpointRemoved, lambda event: f"the inference server at {event.host}:{event.port} no longer gets weights")
_training(
    ev.RestAsked,
    lambda event: f"the trainer of run {event.run} was asked to " + ("free its memory" if event.asleep else "wake up"),
)
_training(
    ev.RestReached,
    lambda event: (
        f"the trainer of run {event.run} " + ("is asleep" if event.asleep else "is awake, with all of its models")
    ),
)
