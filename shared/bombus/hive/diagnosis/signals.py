"""Rules about rewards and groups: whether there is anything to learn from, and whether it is what was meant."""

from bombus.hive.diagnosis.findings import FaultKind, RunFinding, Seen, percent, reward_bounds
from bombus.hive.diagnosis.run import StepFigures
from bombus.hive.diagnosis.statistics import CERTAIN, Moments, median, share_at_least

SILENT = 0.6  # of groups, surely: what is played is then mostly wasted. Half of them is usual in healthy runs
ALONE = 0.4  # of groups
BEYOND = 3.0  # ranges of the rewards seen before: games may double theirs, other scales are ten times as large
INVERTED = -0.2  # correlation of rewards with success


def no_signal(seen: Seen) -> RunFinding | None:
    """Find groups whose episodes all have the same reward, most of them a low one or most of them a high one."""
    silent = sum(row.groups_silent for row in seen.recent)
    groups = sum(row.groups - row.groups_of_one for row in seen.recent)
    if len(seen.recent) < 3 or share_at_least(silent, groups) < SILENT:
        return None
    level = median([row.silent_rewards.mean for row in seen.recent if row.groups_silent])
    least, most = reward_bounds(seen.rows)
    high = level > (least + most) / 2 if most > least else level > 0
    figure = f"in {silent} of {groups} groups all episodes have the same reward, usually about {level:.3g}"
    if high:
        advice = "use harder tasks, or collection.method rollout_until_finish_enough_non_dummy_tasks"
        return seen.found(FaultKind.TOO_EASY, figure, advice, _mostly_silent)
    advice = "use easier tasks first (a curriculum), give partial reward, or set rollout.num_repeat to "
    return seen.found(FaultKind.TOO_HARD, figure, f"{advice}{2 * seen.settings.num_repeat}", _mostly_silent)


def _mostly_silent(row: StepFigures) -> bool:
    return row.groups_silent > SILENT * row.groups


def groups_of_one(seen: Seen) -> RunFinding | None:
    alone, groups = sum(row.groups_of_one for row in seen.recent), sum(row.groups for row in seen.recent)
    if seen.settings.compares_over_batch or share_at_least(alone, groups) < ALONE:
        return None
    return seen.found(
        FaultKind.GROUPS_OF_ONE,
        f"{alone} of {groups} groups have one episode, which cannot be compared with another",
        "end all episodes of a task with the same task id, and claim num_repeat of them; or set trainer.adv_estimator "
        "to reinforce_plus_plus",
        lambda row: row.groups_of_one > ALONE * row.groups,
    )


def reward_out_of_range(seen: Seen) -> RunFinding | None:
    """Find rewards far outside all earlier ones, such as the raw score of one environment among normalized ones."""
    least, most = reward_bounds(seen.before)
    if not seen.comparable or most <= least:
        return None
    low, high = least - BEYOND * (most - least), most + BEYOND * (most - least)
    outside = [row for row in seen.recent if row.groups and (row.lowest < low or row.highest > high)]
    if len(outside) < 2:
        return None
    worst = max((value for row in outside for value in (row.lowest, row.highest)), key=abs)
    return seen.found(
        FaultKind.REWARD_OUT_OF_RANGE,
        f"a reward of {worst:.3g}; those of the {len(seen.before)} steps before are from {least:.3g} to {most:.3g}",
        "normalize the reward in the environment to one scale, or clamp it before the episode is ended",
        lambda row: row.lowest < low or row.highest > high,
    )


def reward_inverted(seen: Seen) -> RunFinding | None:
    pairs = Moments()
    for row in seen.recent:
        pairs.include(row.verdicts)
    if pairs.correlation > INVERTED or pairs.errors > -CERTAIN:
        return None
    return seen.found(
        FaultKind.REWARD_INVERTED,
        f"within groups, rewards and is_success correlate by {pairs.correlation:.2f}: successes get the lower reward",
        "check the sign of the reward: it must be higher for the better episode",
        lambda row: row.verdicts.correlation < INVERTED,
    )


def evaluated_on_trained(seen: Seen) -> RunFinding | None:
    known = sum(row.evaluated_known for row in seen.recent)
    evaluated = sum(row.evaluated.count for row in seen.recent)
    if share_at_least(known, evaluated) < 0.1:  # held-out sets may share a few tasks with the training set
        return None
    first = next(row for row in seen.rows if row.evaluated_known)
    return seen.found(
        FaultKind.EVALUATED_ON_TRAINED,
        f"{percent(known / evaluated)} of {evaluated} evaluation episodes have a task that was trained on",
        "evaluate on tasks that are held out: their ids must not occur in training",
        lambda row: row.step >= first.step,
    )
