"""Diagnose a run: apply every rule to every step as if it were the newest, and tell causes from consequences."""

from collections.abc import Sequence

import msgspec

from bombus.config.job import RunConfig
from bombus.replay.diagnosis import changes, policy, rewards, shares, sources
from bombus.replay.diagnosis.findings import BEFORE, WINDOW, FaultKind, Rule, RunFinding, Seen
from bombus.replay.diagnosis.steps import StepFigures

RULES: tuple[Rule, ...] = (*shares.RULES, *changes.RULES, *policy.RULES, *sources.RULES, *rewards.RULES)

K = FaultKind
_SIGNAL = {K.TOO_HARD, K.TOO_EASY}
_LOSS = {*_SIGNAL, K.REWARD_FALLS}
_MOVED = {K.ENTROPY_COLLAPSE, K.ENTROPY_RISES, K.KL_RUNAWAY, K.GRADIENT_CLIPPED}
_LENGTHS = {K.ANSWERS_GROW, K.ANSWERS_SHRINK, K.TRUNCATED, K.STRAGGLERS, K.TRAINER_WAITS}
_HACKED = {K.REWARD_JUMPS, K.ONE_PART_RISES, K.EVALUATION_FALLS, K.TOO_EASY, K.ENTROPY_COLLAPSE}
_REPEATS = {K.DUPLICATE_ANSWERS, K.ANSWERS_SHRINK, *_SIGNAL, *_HACKED}
# The faults that each cause explains, unless the cause began much later or ended long before.
EXPLAINS: dict[FaultKind, set[FaultKind]] = {
    K.FAILURES_REWARDED: {*_LOSS, *_LENGTHS, K.CLIENT_FAILS, K.LR_TOO_HIGH},
    K.REWARD_INVERTED: {*_MOVED, *_REPEATS, *_LOSS, K.REWARD_DISAGREES, K.LR_TOO_HIGH, K.CONSTANT_ANSWER},
    K.REWARD_DISAGREES: {*_MOVED, *_REPEATS, *_LOSS, K.LR_TOO_HIGH},
    K.REWARD_OUT_OF_RANGE: {*_MOVED, *_HACKED, K.REWARD_DISAGREES, K.LR_TOO_HIGH, K.NOT_FINITE},
    K.GROUPS_OF_ONE: {*_LOSS, K.CLIENT_FAILS},
    K.TOOLS_FAIL: {*_LOSS, *_LENGTHS, K.CLIENT_FAILS, K.LR_TOO_HIGH, K.EPISODES_ABORTED},
    K.CLIENT_FAILS: _LOSS,
    K.SOURCE_DOMINATES: {*_LOSS, K.EVALUATION_FALLS, K.TRAINER_WAITS},
    K.TASKS_REPEAT: {*_SIGNAL, K.EVALUATION_FALLS, K.REWARD_JUMPS, K.DUPLICATE_ANSWERS, K.ENTROPY_COLLAPSE},
    K.EPISODES_ABORTED: {K.TRAINER_WAITS, K.STRAGGLERS, K.SOURCE_DOMINATES},
    K.NOT_FINITE: {*_MOVED, *_LENGTHS, *_LOSS, K.LR_TOO_HIGH, K.EVALUATION_FALLS},
    K.LR_TOO_HIGH: {*_MOVED, *_LENGTHS, *_LOSS, K.EVALUATION_FALLS, K.DUPLICATE_ANSWERS},
    K.SAMPLER_MISMATCH: {*_MOVED, K.REWARD_FALLS, K.LR_TOO_HIGH, K.STALE, K.NOT_FINITE},
    K.STALE: {*_MOVED, K.LR_TOO_HIGH, K.SAMPLER_WAITS},
    K.REWARDED_PHRASE: {*_REPEATS, K.FOLLOWS_LENGTH, K.ALWAYS_YES},
    K.LEAKED_ANSWER: {*_REPEATS, K.ALWAYS_YES},
    K.CONSTANT_PROMPT: {*_REPEATS, *_MOVED, K.REWARD_FALLS, K.CONSTANT_ANSWER, K.REWARDED_PHRASE, K.LEAKED_ANSWER},
    K.CONSTANT_ANSWER: {*_REPEATS, K.REWARD_FALLS, K.REWARDED_PHRASE},
    K.ALWAYS_YES: {*_HACKED, K.ANSWERS_SHRINK},
    K.FOLLOWS_LENGTH: {*_LENGTHS, K.EVALUATION_FALLS},
    K.ONE_PART_RISES: {K.EVALUATION_FALLS, K.ENTROPY_COLLAPSE},
    K.REWARD_FALLS: {K.EVALUATION_FALLS, K.ENTROPY_COLLAPSE, K.ENTROPY_RISES},
    K.REWARD_JUMPS: {*_SIGNAL, K.EVALUATION_FALLS},
    K.ENTROPY_COLLAPSE: {*_SIGNAL, K.DUPLICATE_ANSWERS, K.ANSWERS_SHRINK, K.EVALUATION_FALLS},
    K.ENTROPY_RISES: {*_LENGTHS, *_SIGNAL, K.EVALUATION_FALLS},
    K.KL_RUNAWAY: {K.EVALUATION_FALLS},
    K.DUPLICATE_ANSWERS: _SIGNAL,
    K.ANSWERS_GROW: {K.TRUNCATED, K.STRAGGLERS, K.TRAINER_WAITS},
    K.TRUNCATED: _LOSS,
    K.STRAGGLERS: {K.TRAINER_WAITS},
}


def diagnose(steps: Sequence[StepFigures], job: RunConfig) -> list[RunFinding]:
    """Return what is wrong: the causes with their consequences, sorted by the step at which they began."""
    return merged(steps, [at_step(steps, end, job) for end in range(1, len(steps) + 1)])


def merged(steps: Sequence[StepFigures], by_step: Sequence[Sequence[RunFinding]]) -> list[RunFinding]:
    """Return the causes among what was found at each step, with their consequences."""
    found: dict[FaultKind, RunFinding] = {}
    for row, findings in zip(steps, by_step, strict=True):
        for finding in findings:
            first = found.setdefault(finding.kind, finding)
            found[finding.kind] = msgspec.structs.replace(first, until=row.step)
    return explained(list(found.values()))


def at_step(steps: Sequence[StepFigures], end: int, job: RunConfig) -> list[RunFinding]:
    """Return what the rules find when step number `end` of the sequence, counted from 1, is the newest."""
    if end < 1:
        return []
    middle = max(0, end - WINDOW)
    seen = Seen(steps[max(0, middle - BEFORE) : middle], steps[middle:end], job)
    return [finding for rule in RULES if (finding := rule(seen)) is not None]


def explained(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Return the findings that no other finding explains, each with the findings that it explains."""
    causes = [finding for finding in findings if not any(_explains(other, finding) for other in findings)]
    return sorted(
        (
            msgspec.structs.replace(cause, consequences=tuple(each for each in findings if _explains(cause, each)))
            for cause in causes
        ),
        key=lambda finding: finding.step,
    )


def _explains(cause: RunFinding, other: RunFinding) -> bool:
    # Falling evaluations may have begun to fall at any of the earlier ones with which they are compared.
    since = other.step - (BEFORE if other.kind == K.EVALUATION_FALLS else 0)
    at_once = cause.step <= other.step + WINDOW and since <= cause.until + WINDOW
    return at_once and other.kind in EXPLAINS.get(cause.kind, ())
