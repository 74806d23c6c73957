"""The sentences in a status: what an engine is waiting for, and which problems its run has."""

from collections.abc import Mapping, Sequence

from bombus.figures import counted, duration, seconds_between
from bombus.hive.collection import measures
from bombus.hive.events import ConversationFormat, StreamWentBack, TrainerStalled
from bombus.hive.failures import FailureKind
from bombus.hive.state import EngineState, Phase
from bombus.hive.status.rows import EngineStatus, FormatStatus

SILENT_STEPS = 3  # number of steps in a row without learning after which a status says why


def detail_of(engine: EngineState, now_ns: int) -> str:
    """Return a clause that says what the engine is waiting for, or why its run is suspended or has no trainer."""
    if engine.suspended:
        return f"suspended: {engine.suspended}"
    return "; ".join(filter(None, (_phase_detail(engine, now_ns), no_trainer(engine, now_ns))))


def no_trainer(engine: EngineState, now_ns: int) -> str:
    """Return for how long and why a run has had no trainer, or "" if it has one or never had one."""
    if engine.phase == Phase.OFFLINE or engine.stalled is None:
        return ""
    since = duration(seconds_between(engine.stalled.at_ns, now_ns))
    return f"no trainer for {since}: {stall_text(engine.stalled)}"


def stall_text(stalled: TrainerStalled) -> str:
    at = f" at {stalled.doing}" if stalled.doing else ""
    how = "was not heard from" if stalled.silent else "made no progress"
    return f"{stalled.trainer} {how}{at} for {duration(stalled.still_s)}"


def lost_text(lost: StreamWentBack) -> str:
    gone = f"stream {lost.what} has lost its end: messages {lost.kept + 1:,} to {lost.known:,} are gone"
    return f"{gone}, {counted(lost.needed, 'call')} of them still needed" if lost.needed else gone


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
        models, waiting = len(engine.clients.open_models), engine.clients.waiting
        asleep = "asleep until /wake_up; " if engine.rest_wanted else ""
        episodes = f", {counted(len(engine.open), 'episode')} running" if engine.open else ""
        return f"{asleep}serving {counted(models, 'model')}, {counted(waiting, 'operation')} waiting{episodes}"
    if engine.queues_groups:
        queue = engine.trajectories.queue
        queued = f"{counted(len(queue.groups), 'rollout group')} for batches of {queue.batch_size} sequences"
        episodes = f", {counted(len(engine.open), 'episode')} running" if engine.open else ""
        if engine.makes_steps:
            return queued + (f", step {engine.batch.step} training" if engine.batch else "") + episodes
        return f"{queued} of an outside trainer{episodes}"
    waited_for = next(measure for measure in measures(engine, now_ns) if measure.decides)
    text = f"{waited_for.done} of {waited_for.target} {waited_for.name}"
    return f"{text}, step {engine.batch.step} training" if engine.batch else text


def noting(detail: str, refusing: str) -> str:
    """Return an engine's detail, followed by the reason why the hive accepts no new work if there is one."""
    return f"{detail}. No new work is accepted: {refusing}" if refusing else detail


def format_text(found: ConversationFormat) -> str:
    return f"template {found.template}, tool calls: {found.tool_calls}, reasoning: {found.reasoning}"


def disagreement_of(formats: Sequence[FormatStatus]) -> str:
    """Return a sentence about gateways that use different formats for a run's model, or "" if the gateways agree."""
    if len(formats) < 2:
        return ""
    ways = "; ".join(f"{row.gateway} has {format_text(row.format)}" for row in formats)
    return (
        f"gateways have read the model of this run in {len(formats)} different ways: {ways}. "
        "Install the same versions of bombus, jinja2 and tokenizers for all of them, then restart the engine."
    )


def way_on(until_served: bool) -> str:
    """Return how a suspended run can continue."""
    if until_served:
        return "the run resumes once a replica serves its weights; `bombus resume` lets all replicas retry immediately"
    return "once the cause is gone, `bombus resume` lets the run continue"


def silence_of(engine: EngineState) -> str:
    """Return why nothing was learned in the newest steps, and what to change, or "" if the model has learned."""
    if engine.silent_steps < SILENT_STEPS:
        return ""
    mean = engine.rollouts[-1].rewards.mean if engine.rollouts else 0.0
    return (
        f"nothing was learned in the last {engine.silent_steps} steps: the rewards of each task's episodes are equal "
        f"(their mean is {mean:.3g}), so no answer is better than another. Give tasks that this model sometimes "
        "solves, or partial rewards; raise num_repeat or rollout.temperature; or use the collection method "
        "rollout_until_finish_enough_non_dummy_tasks, which leaves such tasks out"
    )


def failures_text(status: EngineStatus) -> str:
    """Return how many episodes of the run have failed, by kind, or "" if none have."""

    def counts(by_kind: Mapping[FailureKind, int]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(by_kind.items(), key=lambda each: -each[1]))

    aborted = f"{counts(status.aborted_by)} (aborted, no reward)" if status.aborted_by else ""
    ended = f"{counts(status.ended_by)} (at a budget, with a reward)" if status.ended_by else ""
    return "; ".join(filter(None, (aborted, ended)))


def incomplete_text(status: EngineStatus) -> str:
    """Return how many calls were answered without a part of their conversation, or "" if no calls were."""
    if not status.calls_incomplete:
        return ""
    left_out = "without a part of its conversation, such as an image (`bombus replay episode` shows which)"
    return f"{counted(status.calls_incomplete, 'call')} answered, each {left_out}"
