"""The status of a hive as text, for `bombus status`."""

from collections.abc import Sequence

from bombus.figures import byte_size, counted, duration, one_line, seconds_between
from bombus.hive import levels
from bombus.hive.collection import Measure
from bombus.hive.operations.state import mean_loss
from bombus.hive.pacing import Pace
from bombus.hive.state import Hive
from bombus.hive.status.data import hive_status
from bombus.hive.status.detail import failures_text, format_text, incomplete_text
from bombus.hive.status.rows import (
    DataSetStatus,
    EngineStatus,
    EvalStatus,
    ModelStatus,
    MultiModelClaimStatus,
    OpenEpisode,
    OperationsStatus,
    ReplicaStatus,
    StepRollouts,
)
from bombus.hive.trajectories.status import rollout_group_lines
from bombus.hive.why.chains import chain
from bombus.hive.why.links import TIME, LastEvents

BAR_CELLS = 24
EPISODES_SHOWN = 12  # the most episodes in the plain text; the data has all of them
EVALS_SHOWN = 8


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
    ahead = f"{now.unfinished} unfinished and {now.sealable} sealable batches, limit {now.max_staleness}"
    return [f"  ahead of training: {ahead}{', new episodes are waiting' if now.waits else ''}"]


def _episode_lines(running: tuple[OpenEpisode, ...]) -> list[str]:
    """Return a table of the single-model episodes. Multi-model episodes are only counted: see `_multi_model_lines`."""
    episodes = [row for row in running if not row.partners]
    multi = len(running) - len(episodes)
    lines = [f"  {multi} of them are parts of multi-model episodes, which are listed below"] if multi else []
    return lines + _claim_rows("episode", "", [(one_line(row.episode), "", row) for row in episodes], "more")


def _multi_model_lines(claims: Sequence[MultiModelClaimStatus]) -> list[str]:
    """Return a line for each claim of multi-model episodes."""
    if not claims:
        return []
    count = counted(sum(len(row.episodes) for row in claims), "multi-model episode")
    rows = [(" + ".join(row.engines), f"{len(row.episodes):>6}", row) for row in claims]
    return [
        f"{count} of {counted(len(claims), 'claim')}:",
        *_claim_rows("engines", " multi-model", rows, "more claims"),
    ]


def _claim_rows(
    name: str, column: str, rows: Sequence[tuple[str, str, OpenEpisode | MultiModelClaimStatus]], more: str
) -> list[str]:
    """Return a table of claimed episodes. Each of the `rows` consists of a name, the text for the extra column, and the
    episode or claim itself."""
    if not rows:
        return []
    lines = [f"  {name:<20} {'client':<16} {'type':<5}{column} {'calls':>5} {'idle s':>8} {'limit s':>8}"]
    lines += [
        f"  {named:<20} {one_line(row.owner or row.client)[:16]:<16} {row.type:<5}{own} {row.calls:>5} "
        f"{row.idle_s:>8.1f} {row.limit_s:>8.0f}"
        for named, own, row in rows[:EPISODES_SHOWN]
    ]
    return lines + ([f"  and {len(rows) - EPISODES_SHOWN} {more}"] if len(rows) > EPISODES_SHOWN else [])


def _head_lines(status: EngineStatus, waits: Sequence[str]) -> list[str]:
    phase = status.phase.removeprefix("ENGINE.")
    version = status.version if status.version >= 0 else "-"
    since = f" for {duration(status.phase_s)}" if status.run else ""  # unknown before the first run
    # The reason why a run was suspended or has failed is in `waits`.
    detail = "suspended" if status.suspended else one_line(status.detail)
    lines = [f"engine {status.engine}: {phase}{since} ({detail})"]
    lines += [f"  {one_line(each)}" for each in waits]
    model = one_line(status.model) or "-"
    lines.append(f"  model {model}, run {status.run}, step {status.global_step}, policy version {version}")
    if status.begun:
        lines.append(f"  begun {one_line(status.begun)}")
    if status.silent:
        lines.append(f"  warning: {one_line(status.silent)}")
    if status.disagreement:
        lines.append(f"  warning: {one_line(status.disagreement)}")
    elif status.formats:
        lines.append(f"  {one_line(format_text(status.formats[0].format))}")
    if failures := failures_text(status):
        lines.append(f"  failed episodes: {failures}")
    if incomplete := incomplete_text(status):
        lines.append(f"  warning: {incomplete}")
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
    lines = [f"{head}; {counted(found.sessions, 'session')}, {counted(found.saved, 'saved model')}"]
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
    """Return the figures computed by a model's newest operations."""
    parts = [f"{row.last_op} failed" if row.last_failed else ""]
    if (loss := mean_loss(row.scored)) is not None:
        parts.append(f"loss {loss:.6g} per token over {row.scored['tokens']:.0f} tokens")
    if "grad_norm" in row.stepped:
        parts.append(f"gradient norm {row.stepped['grad_norm']:.6g}")
    return ", ".join(filter(None, parts))


def _taken_lines(status: EngineStatus) -> list[str]:
    """Return lines about an operations run's episodes, or no lines if the run never had any."""
    if not (status.open_episodes or status.pool_episodes or status.taken):
        return []
    ended = f"{status.pool_episodes} ended, waiting to be taken ({byte_size(status.pool_bytes)}), {status.taken} taken"
    return [f"episodes: {len(status.open_episodes)} running, {ended}", *_episode_lines(status.open_episodes)]


def _replica_lines(replicas: tuple[ReplicaStatus, ...]) -> list[str]:
    apart = sum(bool(replica.quarantined) for replica in replicas)
    lines = [f"replicas: {len(replicas)}" + (f", {apart} of them quarantined" if apart else "")]
    for replica in replicas:
        version = f"version {replica.version}" if replica.version >= 0 else "nothing loaded"
        if replica.sequence_tokens:
            version += f", sequences of up to {replica.sequence_tokens} tokens"
        if replica.constrains:
            version += ", structured output"
        lines.append(f"  {one_line(replica.replica)} {one_line(replica.url)} {version}")
        if canary := canary_text(replica):
            lines.append(f"    canary: {canary}")
        if replica.quarantined:
            lines.append(f"    quarantined: {one_line(replica.quarantined)}")
    return lines


def canary_text(replica: ReplicaStatus) -> str:
    """Return how far a replica's logprobs are from the trainer's, or "" if there was nothing to compare."""
    check = replica.canary
    if check is None:
        return "not checked" if replica.unchecked else ""
    found = f"{check.difference:.1e} nats from the trainer {one_line(check.way)}"
    return f"{found}; rounding explains {check.limit:.1e}"


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
    if status.rollouts:
        lines += _rollout_lines(status.rollouts[-1])
    if status.evals:
        lines.append("held-out reward by policy version:")
        for row in status.evals[-EVALS_SHOWN:]:
            lines.append(f"  {row.version:>5}  {_eval_figures(row)}")
            lines += [f"         {_eval_figures(each, one_line(each.data_set))}" for each in row.data_sets]
    return lines


def _rollout_lines(row: StepRollouts) -> list[str]:
    success = "" if row.success_rate is None else f", {row.success_rate:.0%} successes"
    means = f"mean reward {row.mean_reward:.4g}{success}, {row.mean_completion_tokens:.4g} sampled tokens"
    lines = [f"episodes of step {row.step}: {row.episodes}, {means}"]
    return lines + [f"  {one_line(name)} {value:.6g}" for name, value in row.metrics.items()]


def _eval_figures(row: EvalStatus | DataSetStatus, name: str = "") -> str:
    """Return the mean over episodes sampled by a single version, and next to it the mean over episodes sampled by
    several."""
    mean = f"{row.mean_reward:.3f}" if row.episodes else "-"
    mixed = f"; {row.mixed} partly sampled by a later version: {row.mixed_mean_reward:.3f}" if row.mixed else ""
    named = f"{name} " if name else ""
    return f"{mean:<5}  {named}({row.episodes} episodes{mixed})"


def _indented_line(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" "))] + one_line(text.lstrip(" "))


def _waits_lines(hive: Hive, engine: str, now_ns: int) -> list[str]:
    """Return a line that says what an engine is waiting for, as `bombus why` does, or no line if the engine is not
    waiting."""
    last = LastEvents()
    if hive.pauses:  # the state does not have the times of other events
        last.anew_ns = hive.pauses[-1].until_ns
    links = chain(hive, now_ns, last, engine) or []
    who = "" if not links or links[-1].who == TIME else f"waiting for {links[-1].who}: "
    return [who + "; ".join(link.what for link in links)] if links else []


def _engine_text(status: EngineStatus, waits: Sequence[str], now_ns: int) -> str:
    lines = _head_lines(status, waits) + _operation_lines(status.operations)
    if status.rollout_groups is not None:
        lines += map(_indented_line, rollout_group_lines(status.rollout_groups))
    if status.clients_take_episodes:
        lines += _taken_lines(status)
    elif status.batches_from_queue:
        lines += _pace_lines(status.pace)
        if status.rollout_groups is None or not status.rollout_groups.ours:  # without our own replicas or trainer
            return "\n".join(lines)
    else:
        lines += _collection_lines(status)
    return "\n".join(lines + _replica_lines(status.replicas) + _training_lines(status, now_ns))


def render_status(hive: Hive, engine: str = "", now_ns: int | None = None) -> str:
    """Return the status of one engine, or of all if `engine` is "", as text that ends with a newline."""
    status = hive_status(hive, now_ns)
    chosen = [row for row in status.engines if engine in ("", row.engine)]
    if not chosen and engine:
        known = ", ".join(row.engine for row in status.engines) or "none"
        return f"no engine {engine!r} in this hive; known engines: {known}\n"
    alarms = [
        f"warning: a message could not be decided and became a dead letter; please report this: {one_line(why)}\n"
        for why in status.dead_letters
    ]
    if status.uncompacted:
        alarms.append(f"warning: the log could not be compacted: {one_line(status.uncompacted)}\n")
    alarms += [f"warning: {lost}\n" for lost in status.went_back]
    if status.level < levels.LEVEL and status.epoch:
        alarms.append(
            f"the log is at feature level {status.level}, which the release before this one can read too; to end the "
            f"upgrade, start the coordinators with --raise-level ({levels.LEVEL})\n"
        )
    parts = [_engine_text(row, _waits_lines(hive, row.engine, status.now_ns), status.now_ns) for row in chosen]
    if multi := _multi_model_lines([row for row in status.multi_model if engine in ("", *row.engines)]):
        parts.append("\n".join(multi))
    return ("\n\n".join(parts) or "no engine yet") + "\n" + "".join(alarms)
