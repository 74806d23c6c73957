"""Rules about time: which side waits for which, and episodes that keep all others waiting."""

from bombus.figures import duration
from bombus.hive.diagnosis.findings import FaultKind, RunFinding, Seen
from bombus.hive.diagnosis.run import StepFigures
from bombus.hive.diagnosis.statistics import median, ratio

WAITS = 10.0  # times as long as the other side works: the costlier machine is then idle for 90 % of the time
SLOWER = 3.0  # times the proportion of before; a job may be lopsided from its start, which its owner knows
SLOWEST = 8.0  # times the median episode: the largest of 250 with a deviation of a half (log) is four times
WORTH_S = 1.0  # shorter waits matter to nobody


def one_side_waits(seen: Seen) -> RunFinding | None:
    """Find a trainer or replicas that are idle most of the time, more than before."""
    collecting = median([row.collecting_s for row in seen.recent])
    training = median([row.training_s for row in seen.recent])
    trainer = collecting > training
    before, recent = seen.means(_collecting_times if trainer else _training_times)
    times = median(recent)
    if not seen.comparable or not before or len(recent) < len(seen.recent) or max(collecting, training) < WORTH_S:
        return None
    if min(recent) < WAITS / 2 or times < WAITS or times < SLOWER * median(before):
        return None
    figure = f"a batch is collected in {duration(collecting)} and trained in {duration(training)}: "
    if trainer:
        advice = f"add replicas or clients, or set collection.max_staleness to {seen.settings.max_staleness + 1}"
        return seen.found(FaultKind.TRAINER_WAITS, f"{figure}the trainer waits", advice)
    advice = "look at seconds_forward_backward and seconds_read; add trainer.processes, or raise max_tokens_per_bin"
    return seen.found(FaultKind.SAMPLER_WAITS, f"{figure}the replicas wait", advice)


def _collecting_times(row: StepFigures) -> float | None:
    return row.collecting_s / row.training_s if row.training_s > 0 else None


def _training_times(row: StepFigures) -> float | None:
    return row.training_s / row.collecting_s if row.collecting_s > 0 else None


def stragglers(seen: Seen) -> RunFinding | None:
    """Find episodes that take so much longer than the others that the batch waits for them."""

    def times(row: StepFigures) -> float | None:
        return row.slowest_s / row.median_s if row.median_s > 0 else None

    before, recent = seen.means(times)
    if not seen.comparable or not before or not recent or min(recent) < SLOWEST / 2:
        return None
    waited = median([row.slowest_s / row.collecting_s for row in seen.recent if row.collecting_s > 0])
    if median(recent) < SLOWEST or ratio(before, recent) < SLOWER / 1.5 or waited < 0.5:
        return None
    slowest = median([row.slowest_s for row in seen.recent])
    return seen.found(
        FaultKind.STRAGGLERS,
        f"the slowest episode of a batch takes {duration(slowest)}, {median(recent):.0f} times as long as half of them",
        "set a limit of time for episodes in the environment, or collection.max_staleness to 1, so that others go on",
        lambda row: (times(row) or 0.0) > SLOWEST / 2,
    )
