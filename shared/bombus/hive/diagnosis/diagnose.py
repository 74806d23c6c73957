"""Diagnose a run: every rule looks at every step as if it were the newest, and causes are told from consequences."""

from collections.abc import Sequence

import msgspec

from bombus.hive.diagnosis import episodes, hacks, pace, policy, signals
from bombus.hive.diagnosis.findings import BEFORE, WINDOW, FaultKind, Rule, RunFinding, Seen
from bombus.hive.diagnosis.run import JobSettings, StepFigures

# By how much they explain: of two findings that began together, the earlier kind in this list is the cause.
RULES: tuple[Rule, ...] = (
    episodes.failures_rewarded,
    signals.reward_inverted,
    signals.reward_out_of_range,
    signals.groups_of_one,
    episodes.tools_fail,
    episodes.client_fails,
    episodes.source_dominates,
    episodes.episodes_aborted,
    policy.not_finite,
    policy.lr_too_high,
    policy.lr_too_low,
    policy.sampler_mismatch,
    policy.stale,
    hacks.rewarded_phrase,
    hacks.leaked_answer,
    hacks.constant_answer,
    hacks.always_yes,
    hacks.follows_length,
    hacks.one_part_rises,
    hacks.reward_jumps,
    policy.entropy_collapse,
    policy.entropy_rises,
    policy.kl_runaway,
    hacks.duplicate_answers,
    policy.gradient_clipped,
    hacks.answers_grow,
    hacks.answers_shrink,
    episodes.truncated,
    signals.no_signal,
    signals.evaluated_on_trained,
    hacks.evaluation_falls,
    pace.stragglers,
    pace.one_side_waits,
)

_LESS_SIGNAL = {FaultKind.TOO_HARD, FaultKind.TOO_EASY}
_MOVED = {FaultKind.ENTROPY_COLLAPSE, FaultKind.ENTROPY_RISES, FaultKind.KL_RUNAWAY, FaultKind.GRADIENT_CLIPPED}
_LENGTHS = {
    FaultKind.ANSWERS_GROW,
    FaultKind.ANSWERS_SHRINK,
    FaultKind.TRUNCATED,
    FaultKind.STRAGGLERS,
    FaultKind.TRAINER_WAITS,
}
_HACKED = {
    FaultKind.REWARD_JUMPS,
    FaultKind.ONE_PART_RISES,
    FaultKind.EVALUATION_FALLS,
    FaultKind.TOO_EASY,
    FaultKind.ENTROPY_COLLAPSE,
}
_REPEATS = {FaultKind.DUPLICATE_ANSWERS, FaultKind.ANSWERS_SHRINK, FaultKind.ENTROPY_COLLAPSE, *_LESS_SIGNAL, *_HACKED}
# What each cause explains, if it did not begin much later.
EXPLAINS: dict[FaultKind, set[FaultKind]] = {
    FaultKind.FAILURES_REWARDED: {*_LESS_SIGNAL, *_LENGTHS, FaultKind.CLIENT_FAILS, FaultKind.LR_TOO_HIGH},
    FaultKind.REWARD_INVERTED: {
        *_MOVED,
        *_LESS_SIGNAL,
        FaultKind.LR_TOO_HIGH,
        FaultKind.EVALUATION_FALLS,
        FaultKind.REWARD_JUMPS,
    },
    FaultKind.REWARD_OUT_OF_RANGE: {*_MOVED, *_HACKED, FaultKind.LR_TOO_HIGH, FaultKind.NOT_FINITE},
    FaultKind.GROUPS_OF_ONE: {*_LESS_SIGNAL, FaultKind.CLIENT_FAILS},
    FaultKind.TOOLS_FAIL: {
        *_LESS_SIGNAL,
        *_LENGTHS,
        FaultKind.CLIENT_FAILS,
        FaultKind.LR_TOO_HIGH,
        FaultKind.EPISODES_ABORTED,
    },
    FaultKind.CLIENT_FAILS: {*_LESS_SIGNAL},
    FaultKind.SOURCE_DOMINATES: {*_LESS_SIGNAL, FaultKind.EVALUATION_FALLS, FaultKind.TRAINER_WAITS},
    FaultKind.EPISODES_ABORTED: {FaultKind.TRAINER_WAITS, FaultKind.STRAGGLERS, FaultKind.SOURCE_DOMINATES},
    FaultKind.NOT_FINITE: {*_MOVED, *_LENGTHS, *_LESS_SIGNAL, FaultKind.LR_TOO_HIGH, FaultKind.EVALUATION_FALLS},
    FaultKind.LR_TOO_HIGH: {*_MOVED, *_LENGTHS, *_LESS_SIGNAL, FaultKind.EVALUATION_FALLS, FaultKind.DUPLICATE_ANSWERS},
    FaultKind.SAMPLER_MISMATCH: {*_MOVED, FaultKind.LR_TOO_HIGH, FaultKind.STALE, FaultKind.NOT_FINITE},
    FaultKind.STALE: {*_MOVED, FaultKind.LR_TOO_HIGH, FaultKind.SAMPLER_WAITS},
    FaultKind.REWARDED_PHRASE: {*_REPEATS, FaultKind.FOLLOWS_LENGTH, FaultKind.ALWAYS_YES},
    FaultKind.LEAKED_ANSWER: {*_REPEATS, FaultKind.ALWAYS_YES},
    FaultKind.CONSTANT_ANSWER: {*_REPEATS, FaultKind.REWARDED_PHRASE},
    FaultKind.ALWAYS_YES: {*_HACKED, FaultKind.ANSWERS_SHRINK},
    FaultKind.FOLLOWS_LENGTH: {*_LENGTHS, FaultKind.EVALUATION_FALLS},
    FaultKind.ONE_PART_RISES: {FaultKind.EVALUATION_FALLS, FaultKind.ENTROPY_COLLAPSE},
    FaultKind.REWARD_JUMPS: {FaultKind.EVALUATION_FALLS, *_LESS_SIGNAL},
    FaultKind.ENTROPY_COLLAPSE: {
        FaultKind.DUPLICATE_ANSWERS,
        *_LESS_SIGNAL,
        FaultKind.ANSWERS_SHRINK,
        FaultKind.EVALUATION_FALLS,
    },
    FaultKind.ENTROPY_RISES: {*_LENGTHS, *_LESS_SIGNAL, FaultKind.EVALUATION_FALLS},
    FaultKind.KL_RUNAWAY: {FaultKind.EVALUATION_FALLS},
    FaultKind.DUPLICATE_ANSWERS: _LESS_SIGNAL,
    FaultKind.ANSWERS_GROW: {FaultKind.TRUNCATED, FaultKind.STRAGGLERS, FaultKind.TRAINER_WAITS},
    FaultKind.TRUNCATED: _LESS_SIGNAL,
    FaultKind.STRAGGLERS: {FaultKind.TRAINER_WAITS},
}


def diagnose(steps: Sequence[StepFigures], settings: JobSettings) -> list[RunFinding]:
    """Return what is wrong, the causes with their consequences, by the step at which they began."""
    found: dict[FaultKind, RunFinding] = {}
    for end in range(1, len(steps) + 1):
        for finding in at_step(steps, end, settings):
            first = found.setdefault(finding.kind, finding)
            found[finding.kind] = msgspec.structs.replace(first, until=steps[end - 1].step)
    return explained(list(found.values()))


def at_step(steps: Sequence[StepFigures], end: int, settings: JobSettings) -> list[RunFinding]:
    """Return what the rules find where step number `end` of the sequence, from 1, is the newest."""
    if end < 1:
        return []
    middle = max(0, end - WINDOW)
    seen = Seen(steps[max(0, middle - BEFORE) : middle], steps[middle:end], settings)
    return [finding for rule in RULES if (finding := rule(seen)) is not None]


def explained(findings: Sequence[RunFinding]) -> list[RunFinding]:
    """Return the findings that none of the others explains, each with those that it explains."""
    causes = [finding for finding in findings if not any(_explains(other, finding) for other in findings)]
    return sorted(
        (
            msgspec.structs.replace(cause, consequences=tuple(each for each in findings if _explains(cause, each)))
            for cause in causes
        ),
        key=lambda finding: finding.step,
    )


def _explains(cause: RunFinding, other: RunFinding) -> bool:
    return other.kind in EXPLAINS.get(cause.kind, ()) and cause.step <= other.step + WINDOW
