"""Describe events in one line of English each, for the screen and `bombus replay timeline`."""

from collections.abc import Iterable
from functools import singledispatch

from bombus.figures import byte_size, one_line
from bombus.hive import events as ev
from bombus.hive.checkpoints import where_begun
from bombus.hive.events import Event
from bombus.hive.status.detail import format_text, lost_text, stall_text

METRICS_SHOWN = 3


def line_of(event: Event) -> str:
    """Describe an event in one line that is safe for a terminal. Raises `TypeError` for an unknown kind of event."""
    return one_line(_text(event))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _some(names: Iterable[str]) -> str:
    """Return one name, or the first and how many more there are."""
    all_names = list(names)
    if not all_names:
        return "nothing"
    return all_names[0] if len(all_names) == 1 else f"{all_names[0]} and {len(all_names) - 1} more"


@singledispatch
def _text(event: Event) -> str:
    raise TypeError(f"{type(event).__name__} has no description: add one to describe.py")


@_text.register
def _(event: ev.EpochOpened) -> str:
    return f"epoch {event.epoch} opened by {event.leader}"


@_text.register
def _(event: ev.LeadingPaused) -> str:
    return f"nobody led for {(event.at_ns - event.since_ns) / 1e9:.1f} s, which counts for no deadline"


@_text.register
def _(event: ev.StorageFilled) -> str:
    return f"no room for new work: {event.why}"


@_text.register
def _(event: ev.LogCompacted) -> str:
    return f"the log begins at event {event.below:,} now" if event.below else "the log need not be compacted any more"


@_text.register
def _(event: ev.CompactionFailed) -> str:
    return f"the log could not be compacted: {event.why}"


@_text.register
def _(event: ev.StreamWentBack) -> str:
    return lost_text(event)


@_text.register
def _(event: ev.MessageSetAside) -> str:
    return f"{event.message} {event.id} of {event.about} could not be decided and was set aside: {event.why}"


@_text.register
def _(event: ev.StorageFreed) -> str:
    return f"room again: {byte_size(event.size - event.used)} of {event.what}"


@_text.register
def _(event: ev.EngineConfigured) -> str:
    return f"configured: {event.model}, {event.collection.method}, configuration {event.config_digest[:8]}"


@_text.register
def _(event: ev.EngineStarted) -> str:
    if event.base:
        return f"run {event.run} started for training operations on {event.base}"
    if not event.config_digest:
        return f"run {event.run} started for the batches of an outside trainer"
    text = f"run {event.run} started with configuration {event.config_digest[:8]}"
    begun = where_begun(event)
    return f"{text}, {begun}" if begun else text


@_text.register
def _(event: ev.CommandAnswered) -> str:
    return f"command {event.command}: {event.why or 'nothing had to be done'}"


@_text.register
def _(event: ev.EngineProgressed) -> str:
    return f"boot: {event.stage}"


@_text.register
def _(event: ev.EngineBooted) -> str:
    return f"run {event.run} booted"


@_text.register
def _(event: ev.EngineStopped) -> str:
    return f"run {event.run} stopped"


@_text.register
def _(event: ev.EngineFailed) -> str:
    return f"run {event.run} failed: {event.reason}"


@_text.register
def _(event: ev.EngineSuspended) -> str:
    return f"run {event.run} is suspended: {event.reason}"


@_text.register
def _(event: ev.EngineResumed) -> str:
    return f"run {event.run} resumed"


@_text.register
def _(event: ev.ModelRead) -> str:
    return f"{event.gateway} reads the model with {format_text(event.format)}"


@_text.register
def _(event: ev.RollingStarted) -> str:
    return f"rolling on version {event.version}" if event.version >= 0 else "rolling, before the first version"


@_text.register
def _(event: ev.RollingClosed) -> str:
    return "no new episodes: the batch is complete"


@_text.register
def _(event: ev.SyncingStarted) -> str:
    return "syncing weights"


@_text.register
def _(event: ev.SyncAgreed) -> str:
    return f"{event.client} agrees to sync"


@_text.register
def _(event: ev.EpisodeClaimed) -> str:
    task = f", task {event.task_hint}" if event.task_hint else ""
    weights = "" if event.sampler is None else f", from {event.sampler.checkpoint or 'the base'}"
    joint = f", together with {' and '.join(map(_some, event.partners.values()))}" if event.partners else ""
    return f"{event.client} claimed {_some(event.episodes)} ({event.type}{task}{weights}{joint})"


@_text.register
def _(event: ev.CallsNoted) -> str:
    tokens = sum(call.completion_tokens for call in event.calls)
    late = sum(call.late for call in event.calls)
    text = f"{_count(len(event.calls), 'call')}, {_count(tokens, 'token')} sampled"
    return f"{text}, {late} too late to count" if late else text


@_text.register
def _(event: ev.EpisodeEnded) -> str:
    if not event.outcomes:
        return f"{event.client} ended nothing"
    mean = sum(outcome.reward for outcome in event.outcomes) / len(event.outcomes)
    kind = "held-out reward" if event.type == ev.EpisodeType.EVAL else "reward"
    tasks = _some(dict.fromkeys(outcome.task for outcome in event.outcomes))
    named = [outcome.data_set for outcome in event.outcomes if outcome.data_set]
    of = f" of {_some(dict.fromkeys(named))}" if named else ""
    return f"{_some(outcome.episode for outcome in event.outcomes)} ended, {kind} {mean:.3f}, task {tasks}{of}"


@_text.register
def _(event: ev.EpisodeAborted) -> str:
    detail = f" ({event.detail})" if event.detail else ""
    return f"{_some(event.episodes)} aborted: {event.reason}{detail}"


@_text.register
def _(event: ev.GroupDropped) -> str:
    what = f"{_count(len(event.episodes), 'episode')} of {_count(len(event.tasks), 'task')}"
    return f"{what} dropped untrained: {event.reason}"


@_text.register
def _(event: ev.EpisodesTaken) -> str:
    return f"{event.client} took {_some(event.episodes)}"


@_text.register
def _(event: ev.PoolCleared) -> str:
    return f"pool cleared: {event.reason}, {_count(event.episodes, 'episode')}, {byte_size(event.bytes)}"


@_text.register
def _(event: ev.BatchReady) -> str:
    if event.taken:
        return f"batch of step {event.step}: {_count(len(event.taken), 'scored group')}"
    episodes = sum(len(group.episodes) for group in event.groups)
    return f"batch of step {event.step}: {_count(len(event.groups), 'group')}, {_count(episodes, 'episode')}"


@_text.register
def _(event: ev.TrainerOpened) -> str:
    return f"trainer {event.trainer} opened epoch {event.trainer_epoch}"


@_text.register
def _(event: ev.TrainerStalled) -> str:
    return stall_text(event)


@_text.register
def _(event: ev.StepCompleted) -> str:
    shown = [f"{name} {event.metrics[name]:.4g}" for name in ("loss", "grad_norm") if name in event.metrics]
    left_out = int(event.metrics.get("updates_left_out", 0))
    if left_out:
        shown.append(f"{_count(left_out, 'update')} left out, not finite")
    groups = int(event.metrics.get("groups_left_out", 0))
    if groups:
        shown.append(f"{_count(groups, 'group')} left out, with advantages that are not finite")
    return ", ".join([f"step {event.step} completed", *shown])


@_text.register
def _(event: ev.StepFailed) -> str:
    return f"step {event.step} failed ({_count(event.failures, 'time')}): {event.reason}"


@_text.register
def _(event: ev.WeightsReady) -> str:
    weights = event.weights
    changed = f", of which {byte_size(weights.delta_bytes)} changed" if weights.delta_bytes else ""
    return f"version {event.version} is ready, {byte_size(weights.bytes)}{changed}"


@_text.register
def _(event: ev.WeightsLoaded) -> str:
    return f"{event.replica} serves version {event.version}"


@_text.register
def _(event: ev.ReplicaJoined) -> str:
    return f"replica {event.replica} joined at {event.url}, room for {event.capacity}"


@_text.register
def _(event: ev.ReplicaQuarantined) -> str:
    return f"replica {event.replica} is quarantined, {why_quarantined(event)}"


def why_quarantined(event: ev.ReplicaQuarantined) -> str:
    what = "its answers are wrong at" if event.answers else "it cannot load"
    return f"{what} version {event.version}: {event.reason}"


@_text.register
def _(event: ev.ReplicaLeft) -> str:
    return f"replica {event.replica} left{': ' + event.reason if event.reason else ''}"


@_text.register
def _(event: ev.SessionOpened) -> str:
    return f"session {event.session} opened" + (f" by {event.owner}" if event.owner else "")


@_text.register
def _(event: ev.SessionEnded) -> str:
    return f"session {event.session} ended: {event.detail or event.reason}"


@_text.register
def _(event: ev.SessionForgotten) -> str:
    return f"the results of session {event.session} can no longer be read"


@_text.register
def _(event: ev.SamplingBegun) -> str:
    return f"session {event.session} samples"


@_text.register
def _(event: ev.ModelOpened) -> str:
    return f"model {event.model} opened on {event.base}"


@_text.register
def _(event: ev.ModelClosed) -> str:
    return f"model {event.model} is gone: {event.why or event.reason}"


@_text.register
def _(event: ev.ModelSuspended) -> str:
    return f"model {event.model} waits: {event.why}" if event.why else f"model {event.model} goes on"


@_text.register
def _(event: ev.ModelRemaking) -> str:
    if event.over:
        return f"trainer {event.trainer_epoch} is through with making model {event.model} again"
    what = f"executes operation {event.number} of {event.model} again" if event.number else f"makes {event.model} again"
    return f"trainer {event.trainer_epoch} {what}"


@_text.register
def _(event: ev.OperationAccepted) -> str:
    size = f", {byte_size(event.body.size)}" if event.body is not None else ""
    return f"{event.op} {event.number} of {event.model} waits{size}"


@_text.register
def _(event: ev.OperationBegun) -> str:
    return f"operation {event.number} of {event.model} is begun by trainer {event.trainer_epoch}"


@_text.register
def _(event: ev.OperationCompleted) -> str:
    shown = [f"{name} {value:.4g}" for name, value in sorted(event.metrics.items())[:METRICS_SHOWN]]
    how = "failed" if event.failed else "executed"
    if event.made is not None and event.made.adapter is not None and event.made.adapter.seed is not None:
        shown.append(f"seed {event.made.adapter.seed}")
    return ", ".join([f"{event.op} {event.number} of {event.model} {how}", *shown])


@_text.register
def _(event: ev.ModelCovered) -> str:
    return f"model {event.model} can go on after operation {event.number}"


@_text.register
def _(event: ev.WeightsKept) -> str:
    saved = event.saved
    if event.saved_ns:
        kept = f"is kept for {saved.ttl_s:.0f} s" if saved.ttl_s else "is kept"
        return f"{saved.name} ({saved.use}) of model {event.model} {kept}" + (", and public" if event.public else "")
    return f"model {event.model} saved as {saved.name} ({saved.use}), {byte_size(saved.size_bytes)}"


@_text.register
def _(event: ev.WeightsRemoved) -> str:
    return f"{event.name} ({event.use}) of model {event.model} " + ("has expired" if event.expired else "was removed")


@_text.register
def _(event: ev.TrainerRegistered) -> str:
    return (
        f"trainer {event.trainer[:12]} takes batches of {event.batch_size} sequences, "
        f"from step {event.starting_step} to {event.num_steps}"
    )


@_text.register
def _(event: ev.BatchesBegun) -> str:
    return "the trainer has asked for its first batch: environments can join"


@_text.register
def _(event: ev.EnvironmentJoined) -> str:
    share = "" if event.minimum is None else f" and asks for {event.minimum:.0%} of each batch"
    return f"environment {event.environment} ({event.name}) sends groups of {event.group_size}{share}"


@_text.register
def _(event: ev.EnvironmentLeft) -> str:
    return f"environment {event.environment} has left: {event.reason}"


@_text.register
def _(event: ev.GroupsPushed) -> str:
    sequences = sum(group.sequences for group in event.groups)
    tokens = sum(group.tokens for group in event.groups)
    return f"{len(event.groups)} scored groups of {sequences} sequences and {tokens} tokens"


@_text.register
def _(event: ev.BatchHandedOut) -> str:
    return f"batch {event.number} handed out, of {len(event.groups)} groups"


@_text.register
def _(event: ev.BatchDelivered) -> str:
    return f"batch {event.number} delivered"


@_text.register
def _(event: ev.GroupsReset) -> str:
    return "all scored groups and environments are forgotten"


@_text.register
def _(event: ev.GroupsGivenUp) -> str:
    whose = f" of batch {event.number}" if event.number else ""
    return f"{_groups(len(event.groups))}{whose} given up: {event.why}"


@_text.register
def _(event: ev.BodiesMoved) -> str:
    return f"the bodies of {_groups(len(event.moved))} that wait are stored once more"


def _groups(count: int) -> str:
    return f"{count} scored {'group' if count == 1 else 'groups'}"


@_text.register
def _(event: ev.TrajectoriesReleased) -> str:
    return f"scored groups before {event.below} are not needed any more"


@_text.register
def _(event: ev.OperationsReleased) -> str:
    return f"operations before {event.below} are not needed any more"


@_text.register
def _(event: ev.EndpointAdded) -> str:
    return f"the inference server at {event.host}:{event.port} gets weights that are put in sync"


@_text.register
def _(event: ev.EndpointRemoved) -> str:
    return f"the inference server at {event.host}:{event.port} gets no more weights"


@_text.register
def _(event: ev.RestAsked) -> str:
    return f"the trainer of run {event.run} is to " + ("free its memory" if event.asleep else "go on")


@_text.register
def _(event: ev.RestReached) -> str:
    return f"the trainer of run {event.run} " + ("sleeps" if event.asleep else "is awake, with all of its models")
