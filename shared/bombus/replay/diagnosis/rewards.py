"""Faults of the reward: on a wrong scale, inverted, or rising for reasons other than better answers."""

from collections.abc import Sequence
from math import inf, sqrt

from bombus.replay.diagnosis.findings import (
    WINDOW,
    FaultKind,
    RunFinding,
    Seen,
    metric_of,
    reward_bounds,
    reward_of,
    success_of,
    tokens_of,
)
from bombus.replay.diagnosis.statistics import (
    CERTAIN,
    FEW,
    SHARE_CERTAIN,
    VISIBLE,
    Moments,
    Spread,
    change,
    drift,
    mean,
    noise,
    ratio,
    surprise,
    total,
)
from bombus.replay.diagnosis.steps import StepFigures

BEYOND = 3.0  # distance from earlier rewards in multiples of their range: games may double it, other scales are tenfold
INVERTED = -0.2  # correlation of rewards with success
UNRELATED = 0.2  # the same, which a reward for anything like success exceeds
DISAGREES = 0.3  # loss of that correlation
FOLLOWS = 0.4  # correlation of rewards with tokens within groups: 0.2 to 0.3 is usual if long answers are better
LONGER = 1.25  # growth of the number of tokens since the steps before
PART = "reward/"  # the prefix of metrics that are parts of the reward
PART_GAIN = 0.08  # a part of the reward must rise beyond its trend by this fraction of its highest value
CLIFF = 1 / 3  # fraction lost of the height above the lowest reward, or gained of the range of rewards
JUMP = 4.5  # a jump in one step is at least this many step-to-step deviations, and half of the change
EVALUATION = 0.1  # fraction of the mean evaluation reward that is lost
SAME_TASKS = 0.5  # fraction of the tasks that two evaluations must share to be compared task by task
NEARLY_ALL = 0.9
PHRASE = 0.5  # fraction of the better answers that have the phrase
EPISODES_MIN = 20


def reward_out_of_range(seen: Seen) -> RunFinding | None:
    """Find rewards far outside all earlier ones, such as the raw score of one environment among normalized ones."""
    least, most = reward_bounds(seen.before)
    if not seen.comparable or most <= least:
        return None
    low, high = least - BEYOND * (most - least), most + BEYOND * (most - least)

    def is_outside(row: StepFigures) -> bool:
        return row.lowest < low or high < row.highest

    outside = [row for row in seen.recent if row.groups and is_outside(row)]
    if len(outside) < 2:
        return None
    worst = max((value for row in outside for value in (row.lowest, row.highest)), key=abs)
    return seen.found(
        FaultKind.REWARD_OUT_OF_RANGE,
        f"a reward of {worst:.3g}; rewards in the {len(seen.before)} steps before are from {least:.3g} to {most:.3g}",
        "normalize the reward in the environment to one scale, or clamp it before the episode is ended",
        is_outside,
    )


def reward_inverted(seen: Seen) -> RunFinding | None:
    pairs = total([row.verdicts for row in seen.recent], Moments)
    if pairs.correlation > INVERTED or pairs.errors > -CERTAIN:
        return None
    return seen.found(
        FaultKind.REWARD_INVERTED,
        f"within groups, rewards and is_success correlate by {pairs.correlation:.2f}: successes get the lower reward",
        "check the sign of the reward: it must be higher for the better episode",
        lambda row: row.verdicts.correlation < INVERTED,
    )


def reward_disagrees(seen: Seen) -> RunFinding | None:
    """Find rewards that agree less with `is_success` than before: they may be mixed up, or their judge may be wrong."""
    then, now = (total([row.verdicts for row in rows], Moments) for rows in (seen.before, seen.recent))
    lost = then.correlation - now.correlation
    if not seen.comparable or lost < DISAGREES or lost * sqrt(min(then.degrees, now.degrees) / 2) < CERTAIN:
        return None
    return seen.found(
        FaultKind.REWARD_DISAGREES,
        f"within groups, rewards and is_success correlate by {now.correlation:.2f}, {then.correlation:.2f} before",
        "compare rewards with their episodes: those of other episodes may be reported, or the judge may be wrong",
        lambda row: row.verdicts.correlation < then.correlation - DISAGREES / 2,
    )


def reward_is_unrelated(seen: Seen) -> RunFinding | None:
    """Find rewards that have nothing to do with `is_success`, perhaps since the first step."""
    pairs = total([row.verdicts for row in seen.rows], Moments)
    if not INVERTED < pairs.correlation < UNRELATED - SHARE_CERTAIN / sqrt(max(1, pairs.degrees)):
        return None
    return seen.found(
        FaultKind.REWARD_DISAGREES,
        f"within groups, rewards and is_success correlate by {pairs.correlation:.2f}: they have little to do with each "
        "other",
        "compare rewards with their episodes: those of other episodes may be reported, or the judge may be wrong",
        lambda row: row.verdicts.correlation < DISAGREES if row.verdicts.degrees else None,
    )


def follows_length(seen: Seen) -> RunFinding | None:
    pairs = total([row.lengths for row in seen.recent], Moments)
    longer = ratio(*seen.both(tokens_of))
    if not seen.comparable or pairs.correlation < FOLLOWS or pairs.errors < CERTAIN or longer < LONGER:
        return None
    return seen.found(
        FaultKind.FOLLOWS_LENGTH,
        f"within groups, rewards and answer lengths correlate by {pairs.correlation:.2f}, and answers are {longer:.1f} "
        "times as long as before",
        "make the reward independent of length; set trainer.overlong to penalty, or trainer.loss_aggregation to token",
        lambda row: row.lengths.correlation > FOLLOWS,
    )


def _parts(seen: Seen) -> list[str]:
    """Return the metrics that are parts of the reward."""
    return sorted({name for row in seen.recent for name in row.metrics if name.startswith(PART)})


def _noise_of_episodes(name: str, rows: Sequence[StepFigures]) -> float:
    """Return the standard deviation that a metric's mean in one step has because of the number of its episodes."""
    spreads = [row.metrics[name] for row in rows if name in row.metrics]
    return sqrt(mean([spread.variance / max(1, spread.count) for spread in spreads]))


def one_part_rises(seen: Seen) -> RunFinding | None:
    """Find a part of the reward, such as the part for the form, that has risen while none of the other parts has.

    Healthy runs learn the form first, so each part is compared with where its own trend led to.
    """
    gains = {name: seen.both(metric_of(name)) for name in _parts(seen)} | {"": seen.both(success_of)}
    gains = {name: both for name, both in gains.items() if all(both)}
    for name, (before, recent) in gains.items() if seen.comparable else ():
        highest = max(abs(value) for value in before + recent)
        gain = mean(recent) - mean(before) - max(0.0, drift(before, recent))
        others = [both for other, both in gains.items() if other != name]
        if not name or not others or gain < PART_GAIN * highest or change(before, recent) < CERTAIN:
            continue
        if surprise(before, recent, _noise_of_episodes(name, seen.before)) < SHARE_CERTAIN:
            continue
        if all(change(*both) < VISIBLE and surprise(*both) < VISIBLE / 2 for both in others):
            return seen.found(
                FaultKind.ONE_PART_RISES,
                f"{name} rose from {mean(before):.2f} to {mean(recent):.2f}, and the other parts of the reward did not",
                f"give {name.removeprefix(PART)} less weight, or count it only if the answer is right",
            )
    return None


def always_yes(seen: Seen) -> RunFinding | None:
    """Find a check whose verdicts used to vary, but which, since some step, has given every episode its best
    verdict."""
    for name in _parts(seen) if seen.comparable else ():
        before, _ = seen.both(metric_of(name))
        recent = [row.metrics[name] for row in seen.recent if name in row.metrics]
        count, highest = sum(spread.count for spread in recent), max(spread.mean for spread in recent)
        same = all(spread.mean == highest and spread.variance < 1e-18 for spread in recent)
        if same and count >= 2 * EPISODES_MIN and before and mean(before[-3:]) < NEARLY_ALL * highest:
            return seen.found(
                FaultKind.ALWAYS_YES,
                f"{name} is {highest:.3g} in all of {count} episodes, and was {mean(before[-3:]):.2f} on average just "
                "before",
                f"test what computes {name.removeprefix(PART)} with a wrong answer: it may accept everything",
            )
    return None


def _reward_by_task(rows: Sequence[StepFigures]) -> dict[tuple[str, str], float]:
    """Return the mean evaluation reward of each task of each data set."""
    spreads: dict[tuple[str, str], Spread] = {}
    for each in (each for row in rows for each in row.played):
        spreads.setdefault((each.data_set, each.task), Spread()).add(each.reward)
    return {task: spread.mean for task, spread in spreads.items()}


def _fall(before: Sequence[StepFigures], recent: Sequence[StepFigures]) -> tuple[float, float]:
    """Return by how much evaluations fell, and the standard error of that.

    Evaluations mostly have the same tasks each time. The difference is then taken task by task, which leaves only the
    luck of the answers as noise, and not that some tasks are harder than others. If too few tasks are the same, the
    means of all episodes are compared.
    """
    then, now = _reward_by_task(before), _reward_by_task(recent)
    losses = Spread()
    for task in (task for task in then if task in now):
        losses.add(then[task] - now[task])
    if losses.count >= max(EPISODES_MIN, SAME_TASKS * max(len(then), len(now))):
        return losses.mean, sqrt(losses.variance / (losses.count - 1))
    old, new = (total([row.evaluated for row in rows], Spread) for rows in (before, recent))
    if min(old.count, new.count) < EPISODES_MIN:
        return 0.0, inf
    return old.mean - new.mean, sqrt(old.variance / old.count + new.variance / new.count)


def evaluation_falls(seen: Seen) -> RunFinding | None:
    """Find an evaluation reward that falls while the training reward holds or rises.

    A training reward that has lost at least half as much is taken to fall, too, even if its own noise hides that.
    """
    if change(*seen.both(reward_of)) < -VISIBLE:
        return None
    for earlier, recent in seen.splits:
        before = [row for row in earlier if row.evaluated.count][-3:]
        if not before:
            continue
        then, now = (total([row.evaluated for row in rows], Spread) for rows in (before, recent))
        lost, error = _fall(before, recent)
        since = [row for row in earlier if row.step >= before[0].step]
        trained, still = (total([row.rewards for row in rows], Spread).mean for rows in (since, recent))
        if lost > max(SHARE_CERTAIN * error, EVALUATION * abs(then.mean), 2 * (trained - still)):
            return seen.found(
                FaultKind.EVALUATION_FALLS,
                f"the evaluation reward fell from {then.mean:.3g} to {now.mean:.3g}, and the training reward did not",
                "the policy memorises the tasks, or exploits a weakness of their reward: use more tasks, and read the "
                "best episodes",
            )
    return None


def _has_stepped(before: Sequence[float], recent: Sequence[float], least: float) -> bool:
    """Return whether values have risen by `least`, much of it in one step, and by more than noise explains."""
    rise = mean(recent) - mean(before[-WINDOW:])
    at_once = recent[0] - before[-1] > rise / 3 and min(recent) > max(before[-WINDOW:])
    return at_once and rise > max(least, CERTAIN * noise(before) / 2)


def _reward_with_signal(row: StepFigures) -> float | None:
    """Return the mean reward of a step's groups that have a signal, as if all groups were of one size."""
    groups = row.groups - row.silent.count
    return (row.groups * row.rewards.mean - row.silent.total) / groups if groups else None


def _only_silent_groups_rose(seen: Seen) -> bool:
    """Return whether the reward has risen only in groups whose episodes all have the same reward.

    What lifts all answers, such as a judge that obeys, also lifts those of the groups that still have a signal. Tasks
    that have become easy do not: the other groups stay as they were. The nearer of the two explanations is chosen.
    """
    rows = seen.before[-WINDOW:]
    then, now = (
        [value for row in each if (value := _reward_with_signal(row)) is not None] for each in (rows, seen.recent)
    )
    rise = mean([row.rewards.mean for row in seen.recent]) - mean([row.rewards.mean for row in rows])
    return bool(then and now) and mean(now) - mean(then) < rise / 2


def reward_jumps(seen: Seen) -> RunFinding | None:
    """Find a reward that rises at once. If it rises only in groups without a signal, their tasks have become easy."""
    before, recent = seen.both(reward_of)
    least, most = reward_bounds(seen.before)
    if not seen.comparable or len(recent) < len(seen.recent) or not before:
        return None
    row = seen.recent[0]
    error = sqrt(row.rewards.variance / sqrt(max(1, row.rewards.count) * max(1, row.groups)))  # similar within a group
    deviation = max(noise(before) * (1 + FEW / len(before)), error, 1e-3 * (most - least))
    needed = max(JUMP * deviation, (mean(recent) - mean(before)) / 2)
    is_jump = recent[0] - before[-1] > needed and min(recent) >= max(before) + JUMP / 4 * deviation
    if not is_jump and not _has_stepped(before, recent, CLIFF * (most - least)):
        return None
    if _only_silent_groups_rose(seen):
        silent, groups = sum(row.silent.count for row in seen.recent), sum(row.groups for row in seen.recent)
        return seen.found(
            FaultKind.TOO_EASY,
            f"in {silent} of {groups} groups all episodes have the same reward: the mean reward jumped from "
            f"{mean(before[-WINDOW:]):.3g} to {mean(recent):.3g}, and that of the other groups hardly changed",
            "read two such groups: their tasks are easy (use harder ones), or their answers leaked",
        )
    return seen.found(
        FaultKind.REWARD_JUMPS,
        f"the mean reward jumped from {before[-1]:.3g} to {recent[0]:.3g} in one step and stayed there",
        "read the best episodes of this step: an answer that leaked, tests that can be changed, or a judge that obeys",
    )


def reward_falls(seen: Seen) -> RunFinding | None:
    """Find a reward that has fallen far, much of it from one step to the next."""
    before, recent = seen.both(reward_of)
    if not seen.comparable or not before or len(recent) < len(seen.recent):
        return None
    height = mean(before[-WINDOW:]) - reward_bounds(seen.rows)[0]
    if not _has_stepped([-value for value in before], [-value for value in recent], CLIFF * height):
        return None
    return seen.found(
        FaultKind.REWARD_FALLS,
        f"the mean reward fell from {before[-1]:.3g} to {recent[0]:.3g} in one step and stayed there",
        "compare an episode of this step with one before, and their prompts: a template, a task or the grader changed",
    )


def rewarded_phrase(seen: Seen) -> RunFinding | None:
    """Find phrases that are new, common to answers of many tasks, and rewarded, such as instructions to a judge."""
    before = [row.answers for row in seen.before if row.answers.count]
    recent = [row.answers for row in seen.recent if row.answers.count]
    if not seen.comparable or not before or sum(each.count for each in recent) < EPISODES_MIN:
        return None
    known = {phrase for each in before[: len(before) // 2 + 1] for phrase in each.phrases}
    for phrase in {phrase for each in recent for phrase in each.phrases} - known:
        shares = [each.phrases[phrase] for each in recent if phrase in each.phrases]
        every, better, others = (mean(each) for each in zip(*shares, strict=True))
        is_rewarded = better > PHRASE and (better - others > PHRASE / 2 or every > NEARLY_ALL)
        if len(shares) >= 3 and is_rewarded and change(*seen.both(reward_of)) > VISIBLE:
            return seen.found(
                FaultKind.REWARDED_PHRASE,
                f"a phrase that was new {len(shares)} steps ago is in {better:.0%} of the better answers to "
                f"different tasks, and in {others:.0%} of the others",
                "read the best episodes: if the phrase addresses the judge, show the judge the answer as quoted data",
            )
    return None


RULES = (
    reward_out_of_range,
    reward_inverted,
    reward_disagrees,
    reward_is_unrelated,
    follows_length,
    one_part_rises,
    always_yes,
    evaluation_falls,
    reward_jumps,
    reward_falls,
    rewarded_phrase,
)
