"""Rules about rewards that rise for the wrong reason: length, form, a verifier that is fooled, answers that repeat."""

from math import sqrt

from bombus.hive.diagnosis.answers import AnswerFigures
from bombus.hive.diagnosis.findings import (
    FaultKind,
    RunFinding,
    Seen,
    metric_of,
    percent,
    reward_bounds,
    reward_of,
    success_of,
    tokens_of,
)
from bombus.hive.diagnosis.run import REWARD_PART, StepFigures
from bombus.hive.diagnosis.statistics import (
    CERTAIN,
    EPISODES_CERTAIN,
    FEW,
    VISIBLE,
    Moments,
    Spread,
    change,
    drift,
    mean,
    median,
    noise,
    ratio,
    rises,
    share_at_least,
)

FOLLOWS = 0.4  # correlation of rewards with tokens within groups: 0.2 to 0.3 is usual where long answers are better
LONGER = 1.25  # times the tokens of the steps before
GROWN = 1.7  # the same without a gain in reward
SHORTER = 0.4
PART_GAIN = 0.08  # of a part of the reward, beyond ...
OTHERS_GAIN = 0.3  # of that gain
STEEPER = 1.5  # ... times its trend before: form is learnt first in healthy runs too
JUMP = 4.5  # deviations of the reward from step to step, in one step that makes up half of the change
EVALUATION = 0.1  # of the mean evaluation reward
NEARLY_ALL = 0.9
DUPLICATES = 0.6  # of the answers: a healthy group of long answers has next to none
CONSTANT = 0.6  # of the tasks
LEAKED = 0.35  # of the best answers
PHRASE = 0.5  # of the better answers
ANSWERS_MIN = 20  # that were read in the window


def follows_length(seen: Seen) -> RunFinding | None:
    pairs = Moments()
    for row in seen.recent:
        pairs.include(row.lengths)
    before, recent = seen.means(tokens_of)
    longer = ratio(before, recent)
    if not seen.comparable or pairs.correlation < FOLLOWS or pairs.errors < CERTAIN or longer < LONGER:
        return None
    return seen.found(
        FaultKind.FOLLOWS_LENGTH,
        f"within groups, rewards and answer lengths correlate by {pairs.correlation:.2f}, and answers are {longer:.1f} "
        "times as long as before",
        "make the reward independent of length; set trainer.overlong to penalty, or trainer.loss_aggregation to token",
        lambda row: row.lengths.correlation > FOLLOWS,
    )


def answers_grow(seen: Seen) -> RunFinding | None:
    before, recent = seen.means(tokens_of)
    if not seen.comparable or ratio(before, recent) < GROWN or change(before, recent) < CERTAIN:
        return None
    if rises(*seen.means(reward_of)):
        return None
    limit = median(before) * (1 + GROWN) / 2
    return seen.found(
        FaultKind.ANSWERS_GROW,
        f"answers grew from {median(before):.0f} to {median(recent):.0f} tokens, and the reward did not rise",
        "set trainer.overlong to penalty with an overlong_buffer, or trainer.loss_aggregation to token",
        lambda row: row.tokens.mean > limit,
    )


def answers_shrink(seen: Seen) -> RunFinding | None:
    before, recent = seen.means(tokens_of)
    if not seen.comparable or ratio(before, recent) > SHORTER or change(before, recent) > -CERTAIN:
        return None
    gain = seen.means(success_of)
    if not gain[1]:
        gain = seen.means(reward_of)
    if rises(*gain):
        return None
    limit = median(before) * (1 + SHORTER) / 2
    return seen.found(
        FaultKind.ANSWERS_SHRINK,
        f"answers shrank from {median(before):.0f} to {median(recent):.0f} tokens, and no more of them are right",
        "read the best episodes (`bombus replay episodes --sort reward --reverse`): giving up early seems to pay",
        lambda row: row.tokens.mean < limit,
    )


def one_part_rises(seen: Seen) -> RunFinding | None:
    """Find a part of the reward, such as that for the form, that has risen while all others have not moved up."""
    if not seen.comparable:
        return None
    names = {name for row in seen.recent for name in row.parts()}
    gains = {name: seen.means(metric_of(name)) for name in names}
    gains = {name: both for name, both in gains.items() if both[0] and both[1]}
    for name, (before, recent) in gains.items():
        highest = max(abs(value) for value in before + recent)
        gain = mean(recent) - mean(before) - STEEPER * max(0.0, drift(before, recent))
        others = [both for other, both in gains.items() if other != name]
        if seen.recent[-1].successes.count:
            others.append(seen.means(success_of))
        if not others or gain < PART_GAIN * highest or change(before, recent) < CERTAIN:
            continue
        if all(change(*both) < VISIBLE / 2 and mean(both[1]) - mean(both[0]) < OTHERS_GAIN * gain for both in others):
            return seen.found(
                FaultKind.ONE_PART_RISES,
                f"{name} rose from {mean(before):.2f} to {mean(recent):.2f}, and the other parts of the reward did not",
                f"give {name.removeprefix(REWARD_PART)} less weight, or count it only where the answer is right",
            )
    return None


def always_yes(seen: Seen) -> RunFinding | None:
    """Find a check whose verdicts varied, and which has said the best to every episode from one step on."""
    if not seen.comparable:
        return None
    for name in sorted({name for row in seen.recent for name in row.parts()}):
        of = metric_of(name)
        before, recent = [mean(part[-3:]) for part in seen.means(of)], [row.metrics.get(name) for row in seen.recent]
        spreads = [spread for spread in recent if spread is not None]
        highest = max((spread.mean for spread in spreads), default=0.0)
        same = all(spread.mean == highest and spread.deviation < 1e-9 for spread in spreads)
        count = sum(spread.count for spread in spreads)
        if len(spreads) == len(recent) and same and count >= 2 * ANSWERS_MIN and before[0] < NEARLY_ALL * highest:
            return seen.found(
                FaultKind.ALWAYS_YES,
                f"{name} is {highest:.3g} in all of {count} episodes, and was {before[0]:.2f} on average just before",
                f"test what computes {name.removeprefix(REWARD_PART)} with a wrong answer: it may accept everything",
            )
    return None


def evaluation_falls(seen: Seen) -> RunFinding | None:
    """Find a training reward that holds or rises while that of evaluation falls."""
    before = [row.evaluated for row in seen.before if row.evaluated.count][-3:]
    then, now = Spread(), Spread()
    for each in before:
        then.include(each)
    for row in seen.recent:
        now.include(row.evaluated)
    if not seen.comparable or min(then.count, now.count) < ANSWERS_MIN or change(*seen.means(reward_of)) < -VISIBLE:
        return None
    error = sqrt(then.variance / then.count + now.variance / now.count)
    if then.mean - now.mean < max(EPISODES_CERTAIN * error, EVALUATION * abs(then.mean)):
        return None
    return seen.found(
        FaultKind.EVALUATION_FALLS,
        f"the evaluation reward fell from {then.mean:.3g} to {now.mean:.3g}, and the training reward did not",
        "the policy learns the training tasks, or a weakness of their reward: use more tasks, and read the best "
        "episodes",
    )


def reward_jumps(seen: Seen) -> RunFinding | None:
    before, recent = seen.means(reward_of)
    least, most = reward_bounds(seen.before)
    if not seen.comparable or len(recent) < len(seen.recent) or not before:
        return None
    row = seen.recent[0]
    error = sqrt(row.rewards.variance / sqrt(max(1, row.rewards.count) * max(1, row.groups)))  # groups are partly alike
    deviation = max(noise(before) * (1 + FEW / len(before)), error, 1e-3 * (most - least))
    jump = recent[0] - before[-1]
    if (
        jump < max(JUMP * deviation, (mean(recent) - mean(before)) / 2)
        or min(recent) < max(before) + JUMP / 4 * deviation
    ):
        return None
    return seen.found(
        FaultKind.REWARD_JUMPS,
        f"the mean reward jumped from {before[-1]:.3g} to {recent[0]:.3g} in one step and stayed there",
        "read the best episodes of this step: an answer that leaked, tests that can be changed, or a judge that obeys",
    )


# ---- what needs the answers ---------------------------------------------------------------------------------------


def _read(rows: list[StepFigures]) -> list[AnswerFigures]:
    return [row.answers for row in rows if row.answers is not None and row.answers.count]


def duplicate_answers(seen: Seen) -> RunFinding | None:
    recent = _read(list(seen.recent))
    count = sum(each.count for each in recent)
    equal = sum(each.duplicates * each.count for each in recent)
    if count < ANSWERS_MIN or share_at_least(equal, count) < DUPLICATES:
        return None
    return seen.found(
        FaultKind.DUPLICATE_ANSWERS,
        f"{percent(equal / count)} of {count} answers that were read have an equal one in their group",
        "sample with temperature 1 and no fixed seed; if the entropy is low, set trainer.clip_high to 0.28",
        lambda row: row.answers is not None and row.answers.duplicates > DUPLICATES,
    )


def constant_answer(seen: Seen) -> RunFinding | None:
    recent = _read(list(seen.recent))
    tasks = sum(each.tasks for each in recent)
    text = max(recent, key=lambda each: each.constant, default=AnswerFigures()).constant_text
    same = sum(each.constant * each.tasks for each in recent if each.constant_text == text)
    if tasks < ANSWERS_MIN / 2 or min(each.tasks for each in recent) < 2 or share_at_least(same, tasks) < CONSTANT:
        return None
    return seen.found(
        FaultKind.CONSTANT_ANSWER,
        f"the same answer is given to {same:.0f} of {tasks} tasks that were read",
        "read one episode: what is rewarded does not depend on the task. Balance the tasks, or change the reward",
        lambda row: row.answers is not None and row.answers.constant > CONSTANT and row.answers.constant_text == text,
    )


def leaked_answer(seen: Seen) -> RunFinding | None:
    before, recent = _read(list(seen.before)), _read(list(seen.recent))
    best = sum(each.best for each in recent)
    copied = sum(each.leaked * each.best for each in recent)
    usual = mean([each.leaked for each in before if each.best])
    if not seen.comparable or best < ANSWERS_MIN or share_at_least(copied, best) < max(LEAKED, 2 * usual):
        return None
    return seen.found(
        FaultKind.LEAKED_ANSWER,
        f"{percent(copied / best)} of the best answers stand word for word in their prompt, {percent(usual)} before",
        "read one with `bombus replay episode ID --prompt`: a tool, a hint or an earlier turn shows the solution",
        lambda row: row.answers is not None and row.answers.best > 0 and row.answers.leaked > LEAKED,
    )


def rewarded_phrase(seen: Seen) -> RunFinding | None:
    """Find words that are new, common to answers of many tasks, and rewarded: such as orders to a judge."""
    before, recent = _read(list(seen.before)), _read(list(seen.recent))
    if not seen.comparable or sum(each.count for each in recent) < ANSWERS_MIN or not before:
        return None
    known = {phrase for each in before[: len(before) // 2 + 1] for phrase in each.phrases}
    rewards = change(*seen.means(reward_of))
    for phrase in {phrase for each in recent for phrase in each.phrases} - known:
        shares = [each.phrases[phrase] for each in recent if phrase in each.phrases]
        better, worse = mean([share[1] for share in shares]), mean([share[2] for share in shares])
        everywhere = mean([share[0] for share in shares]) > NEARLY_ALL
        if len(shares) >= 3 and better > PHRASE and (better - worse > PHRASE / 2 or everywhere) and rewards > VISIBLE:
            return seen.found(
                FaultKind.REWARDED_PHRASE,
                f"a phrase that was new {len(shares)} steps ago stands in {percent(better)} of the better answers to "
                f"different tasks, and in {percent(worse)} of the others",
                "read the best episodes: if the phrase speaks to the judge, show the judge the answer as quoted data",
            )
    return None
