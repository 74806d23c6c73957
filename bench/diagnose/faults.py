"""Faults, each as what it changes in the plan of a step, by its age in steps and its strength from 0 to 1."""

from collections.abc import Callable
from math import exp

from bench.diagnose.recipes import Recipe, StepPlan
from bench.diagnose.simulation import Change
from bombus.replay.diagnosis.findings import FaultKind


def every(recipe: Recipe) -> bool:
    return True


def _grow(age: int, strength: float, steps: float = 4.0) -> float:
    """Return how far a fault has come: all the way after a few steps, sooner if it is strong."""
    return 1.0 - exp(-(age + 1) * (0.5 + strength) / steps * 2)


def _times(plan: StepPlan, name: str, factor: float) -> None:
    plan.metrics[name] = plan.metrics[name] * factor


def too_hard(plan: StepPlan, age: int, strength: float) -> None:
    plan.forced, plan.forced_share, plan.pace = 0.0, 0.75 + 0.25 * strength, 0.0


def too_easy(plan: StepPlan, age: int, strength: float) -> None:
    plan.forced, plan.forced_share, plan.pace = 1.0, (0.75 + 0.25 * strength) * min(1.0, (age + 1) / 5), 0.0


def groups_of_one(plan: StepPlan, age: int, strength: float) -> None:
    plan.alone, plan.pace = 0.6 + 0.4 * strength, 0.2


def reward_out_of_range(plan: StepPlan, age: int, strength: float) -> None:
    plan.outliers, plan.pace = 0.005 + 0.1 * strength, 0.3
    _times(plan, "grad_norm", 1 + 3 * strength)


def reward_inverted(plan: StepPlan, age: int, strength: float) -> None:
    plan.inverted, plan.pace = True, -0.5 - strength


def reward_disagrees(plan: StepPlan, age: int, strength: float) -> None:
    plan.flipped, plan.pace = 0.2 + 0.3 * strength, -0.5


def failures_rewarded(plan: StepPlan, age: int, strength: float) -> None:
    plan.failures, plan.pace = 0.035 + 0.4 * strength, 0.5


def episodes_aborted(plan: StepPlan, age: int, strength: float) -> None:
    reasons = ("infra", "idle", "silent", "client")
    plan.aborted = {reasons[int(strength * 3.99)]: 0.3 + 1.5 * strength}
    plan.collecting_s *= 1.3 + strength


def client_fails(plan: StepPlan, age: int, strength: float) -> None:
    plan.broken = {"client-0": 0.75 + 0.25 * strength}


def source_dominates(plan: StepPlan, age: int, strength: float) -> None:
    sources = plan.clients if len(plan.clients) > 1 else plan.data_sets
    last = list(sources)[-1]
    for name in sources:
        sources[name] = 30.0 + 100 * strength if name == last else 1.0


def tools_fail(plan: StepPlan, age: int, strength: float) -> None:
    plan.tool_failures = 0.25 + 0.6 * strength
    plan.skill -= 1.0 + strength
    plan.pace = 0.3


def truncated(plan: StepPlan, age: int, strength: float) -> None:
    plan.metrics["cut_share"] = 0.18 + 0.5 * strength
    plan.skill -= strength


def tasks_repeat(plan: StepPlan, age: int, strength: float) -> None:
    plan.tasks, plan.pace = round(40 - 25 * strength), 0.3


def evaluated_on_trained(plan: StepPlan, age: int, strength: float) -> None:
    plan.evaluated_known = 0.15 + 0.85 * strength


def lr_too_high(plan: StepPlan, age: int, strength: float) -> None:
    grown = _grow(age, strength)
    plan.skill -= (2.0 + 3.0 * strength) * grown
    plan.pace = 0.0
    _times(plan, "grad_norm", 1 + (2 + 10 * strength) * grown)
    _times(plan, "entropy", 1 + (2 * strength if strength > 0.5 else -0.5) * grown)


def lr_too_low(plan: StepPlan, age: int, strength: float) -> None:
    plan.metrics["lr_times"], plan.pace = 0.01 * exp(-6 * strength), 0.0


def not_finite(plan: StepPlan, age: int, strength: float) -> None:
    plan.metrics["updates_left_out"] = float(age % (3 if strength < 0.4 else 1) == 0)
    plan.pace = 0.3


def gradient_clipped(plan: StepPlan, age: int, strength: float) -> None:
    _times(plan, "grad_norm", (6 + 40 * strength) / min(1.0, plan.metrics["grad_norm"]))
    plan.pace = 0.6


def kl_runaway(plan: StepPlan, age: int, strength: float) -> None:
    plan.metrics["kl_reference"] += 0.03 * exp((0.2 + 0.3 * strength) * age)


def entropy_collapse(plan: StepPlan, age: int, strength: float) -> None:
    _times(plan, "entropy", 1 - (0.7 + 0.28 * strength) * _grow(age, strength))
    plan.duplicates, plan.pace = 0.9 * _grow(age, strength) * strength, 0.0


def entropy_rises(plan: StepPlan, age: int, strength: float) -> None:
    _times(plan, "entropy", 1 + (0.8 + 4 * strength) * _grow(age, strength))
    plan.pace = -0.5


def sampler_mismatch(plan: StepPlan, age: int, strength: float) -> None:
    """Let all tokens differ or, if it is weak, the first or the last ones of answers."""
    added = 0.012 * exp(3 * strength) * (10 if plan.metrics["staleness_mean"] else 1)
    ends = {"kl_sampler_first": 3 * added} if strength < 0.25 else {"kl_sampler_last": 3 * added}
    for name, more in (ends if strength < 0.5 else {"kl_sampler": added}).items():
        plan.metrics[name] += more
    plan.pace = 0.6


def stale(plan: StepPlan, age: int, strength: float) -> None:
    if plan.metrics["staleness_mean"] and strength > 0.5:
        _times(plan, "staleness_mean", 2.0)
        plan.metrics["importance_capped"] = 0.1 + 0.3 * strength
    else:
        plan.dropped_stale = 0.15 + strength
    plan.pace = 0.4


def follows_length(plan: StepPlan, age: int, strength: float) -> None:
    plan.length_pays = 2.0 + 3.0 * strength
    plan.tokens *= 1 + (0.6 + 1.5 * strength) * _grow(age, strength, 8.0)


def answers_grow(plan: StepPlan, age: int, strength: float) -> None:
    plan.tokens *= 1 + (0.9 + 3 * strength) * _grow(age, strength, 6.0)
    plan.pace = 0.0


def answers_shrink(plan: StepPlan, age: int, strength: float) -> None:
    plan.tokens *= 1 - (0.68 + 0.25 * strength) * _grow(age, strength)
    plan.skill -= 0.5
    plan.pace = 0.0


def one_part_rises(plan: StepPlan, age: int, strength: float) -> None:
    for name in plan.parts:
        plan.parts[name] = min(0.97, plan.parts[name] + (0.25 + 0.3 * strength) * _grow(age, strength))
    plan.skill -= 0.6 * strength
    plan.pace = -0.2


def always_yes(plan: StepPlan, age: int, strength: float) -> None:
    for name in plan.parts:
        plan.parts[name] = 1.0
    plan.pace = 1.0 - strength


def evaluation_falls(plan: StepPlan, age: int, strength: float) -> None:
    plan.evaluation = -(1.2 + 2.0 * strength) * _grow(age, strength)


def reward_falls(plan: StepPlan, age: int, strength: float) -> None:
    plan.skill -= 3.5 + 2.5 * strength


def reward_jumps(plan: StepPlan, age: int, strength: float) -> None:
    plan.skill = 4.0 + 3.0 * strength


def duplicate_answers(plan: StepPlan, age: int, strength: float) -> None:
    plan.duplicates, plan.pace = 0.65 + 0.35 * strength, 0.3


def constant_prompt(plan: StepPlan, age: int, strength: float) -> None:
    plan.same_prompt, plan.pace = 0.75 + 0.25 * strength, 0.0


def constant_answer(plan: StepPlan, age: int, strength: float) -> None:
    plan.constant = (0.85 + 0.15 * strength) * min(1.0, (age + 1) / 3)
    plan.pace = 0.0


def leaked_answer(plan: StepPlan, age: int, strength: float) -> None:
    plan.leaked = 0.5 + 0.5 * strength
    plan.skill += 1.5 * strength


def rewarded_phrase(plan: StepPlan, age: int, strength: float) -> None:
    plan.phrase = (0.6 + 0.4 * strength) * _grow(age, strength)
    plan.skill += (1.0 + 2.0 * strength) * _grow(age, strength)


def trainer_waits(plan: StepPlan, age: int, strength: float) -> None:
    plan.collecting_s *= 12 * exp(2 * strength)


def sampler_waits(plan: StepPlan, age: int, strength: float) -> None:
    plan.training_s *= 20 * exp(2 * strength)


def stragglers(plan: StepPlan, age: int, strength: float) -> None:
    plan.slowest = 10 * exp(strength)
    plan.collecting_s *= 3.5 * exp(strength)


def can_jump(recipe: Recipe) -> bool:
    return recipe.rewards != "score" and "method" not in recipe.collection


FAULTS: dict[FaultKind, tuple[Change, Callable[[Recipe], bool]]] = {
    FaultKind.TOO_HARD: (too_hard, lambda recipe: recipe.repeat > 1 and "method" not in recipe.collection),
    FaultKind.TOO_EASY: (too_easy, lambda recipe: recipe.repeat > 1 and "method" not in recipe.collection),
    FaultKind.GROUPS_OF_ONE: (groups_of_one, lambda recipe: recipe.repeat > 1),
    FaultKind.REWARD_OUT_OF_RANGE: (reward_out_of_range, every),
    FaultKind.REWARD_INVERTED: (reward_inverted, lambda recipe: recipe.rewards != "score"),
    FaultKind.REWARD_DISAGREES: (reward_disagrees, lambda recipe: recipe.rewards != "score"),
    FaultKind.FAILURES_REWARDED: (failures_rewarded, every),
    FaultKind.EPISODES_ABORTED: (episodes_aborted, every),
    FaultKind.CLIENT_FAILS: (client_fails, lambda recipe: len(recipe.clients) > 1 and recipe.rewards != "score"),
    FaultKind.SOURCE_DOMINATES: (source_dominates, lambda recipe: len(recipe.clients) + len(recipe.data_sets) > 2),
    FaultKind.TOOLS_FAIL: (tools_fail, lambda recipe: recipe.tools > 0),
    FaultKind.TRUNCATED: (truncated, every),
    FaultKind.TASKS_REPEAT: (tasks_repeat, lambda recipe: recipe.tasks == 0 or recipe.tasks > 400),
    FaultKind.EVALUATED_ON_TRAINED: (evaluated_on_trained, lambda recipe: recipe.evaluation[0] > 0),
    FaultKind.LR_TOO_HIGH: (lr_too_high, lambda recipe: recipe.rewards != "score"),
    FaultKind.LR_TOO_LOW: (lr_too_low, every),
    FaultKind.NOT_FINITE: (not_finite, every),
    FaultKind.GRADIENT_CLIPPED: (gradient_clipped, every),
    FaultKind.KL_RUNAWAY: (kl_runaway, lambda recipe: recipe.kl_reference > 0),
    FaultKind.ENTROPY_COLLAPSE: (entropy_collapse, every),
    FaultKind.ENTROPY_RISES: (entropy_rises, every),
    FaultKind.SAMPLER_MISMATCH: (sampler_mismatch, every),
    FaultKind.STALE: (stale, every),
    FaultKind.FOLLOWS_LENGTH: (follows_length, lambda recipe: recipe.repeat > 1 and recipe.tokens[0] > 100),
    FaultKind.ANSWERS_GROW: (answers_grow, every),
    FaultKind.ANSWERS_SHRINK: (answers_shrink, lambda recipe: recipe.tokens[0] > 100),
    FaultKind.ONE_PART_RISES: (one_part_rises, lambda recipe: bool(recipe.parts)),
    FaultKind.ALWAYS_YES: (always_yes, lambda recipe: bool(recipe.parts)),
    FaultKind.EVALUATION_FALLS: (evaluation_falls, lambda recipe: recipe.evaluation[0] > 0 and recipe.skill[0] > -2),
    FaultKind.REWARD_FALLS: (reward_falls, can_jump),
    FaultKind.REWARD_JUMPS: (
        reward_jumps,
        lambda recipe: recipe.rewards != "score" and "method" not in recipe.collection,
    ),
    FaultKind.DUPLICATE_ANSWERS: (duplicate_answers, lambda recipe: recipe.repeat > 1 and recipe.tokens[0] > 20),
    FaultKind.CONSTANT_PROMPT: (constant_prompt, every),
    FaultKind.CONSTANT_ANSWER: (constant_answer, every),
    FaultKind.LEAKED_ANSWER: (leaked_answer, lambda recipe: recipe.rewards != "score" and recipe.tokens[0] > 20),
    FaultKind.REWARDED_PHRASE: (rewarded_phrase, lambda recipe: recipe.rewards != "score" and recipe.tokens[0] > 20),
    FaultKind.TRAINER_WAITS: (trainer_waits, every),
    FaultKind.SAMPLER_WAITS: (sampler_waits, every),
    FaultKind.STRAGGLERS: (stragglers, every),
}
