"""Each rule with a planted fault, and with a healthy run next to it that it must not mistake for one."""

from collections import Counter
from collections.abc import Sequence
from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

from bombus.config.job import RunConfig
from bombus.hive.failures import FAILURES, FailureKind
from bombus.replay.diagnosis.answers import AnswerFigures
from bombus.replay.diagnosis.diagnose import EXPLAINS, at_step, diagnose, explained
from bombus.replay.diagnosis.findings import FaultKind, RunFinding
from bombus.replay.diagnosis.statistics import Moments, Spread
from bombus.replay.diagnosis.steps import EvaluatedEpisode, StepFigures
from tests.replay.diagnosis.rows import FAULTY, STEPS, correlated, row, run_of, spread

JOB = RunConfig.model_validate({"trainer": {"kl_coef": 0.01, "lr": 1e-6}})
Fields = dict[str, Any]


def metrics(**changes: Spread) -> Fields:
    named = {name.replace("reward_", "reward/"): each for name, each in changes.items()}
    return {"metrics": row(1).metrics | named}


def answers(**changes: Any) -> Fields:
    ordinary: Fields = {"rewards": [0.0, 1.0] * 16, "tasks": 4, "best": 12}
    return {"answers": AnswerFigures(**ordinary | changes)}


# By kind: what the newest steps have, what a healthy neighbour has there, and what the steps before have in both.
CASES: dict[FaultKind, tuple[Fields, Fields, Fields]] = {
    FaultKind.TOO_HARD: ({"silent": spread(0, 0, 15)}, {"silent": spread(0, 0, 9)}, {}),
    FaultKind.TOO_EASY: ({"silent": spread(1, 0, 15)}, {"silent": spread(1, 0, 9)}, {}),
    FaultKind.GROUPS_OF_ONE: ({"groups_of_one": 12}, {"groups_of_one": 3}, {}),
    FaultKind.REWARD_OUT_OF_RANGE: ({"highest": 50.0}, {"highest": 3.0}, {}),
    FaultKind.REWARD_INVERTED: ({"verdicts": correlated(-0.9)}, {"verdicts": correlated(0.1)}, {}),
    FaultKind.REWARD_DISAGREES: ({"verdicts": correlated(0.3)}, {"verdicts": correlated(0.7)}, {}),
    FaultKind.FAILURES_REWARDED: ({"failed": 20}, {"failed": 1}, {}),
    FaultKind.EPISODES_ABORTED: ({"aborted": Counter(sandbox=90)}, {"aborted": Counter(sandbox=8)}, {}),
    FaultKind.CLIENT_FAILS: (
        {"clients": {"a": spread(0.02, 0.05, 8), "b": spread(0.5, 0.3, 8)}},
        {"clients": {"a": spread(0.02, 0.05, 8), "b": spread(0.05, 0.3, 8)}},  # both: the tasks are harder
        {},
    ),
    FaultKind.SOURCE_DOMINATES: (
        {"clients": {"a": spread(0.5, 0.3, 16)}},
        {"clients": {"a": spread(0.5, 0.3, 11), "b": spread(0.5, 0.3, 5)}},
        {},
    ),
    FaultKind.TOOLS_FAIL: (metrics(tool_failures=spread(3.0)), metrics(tool_failures=spread(0.7)), {}),
    FaultKind.TRUNCATED: ({"episodes_cut": 50.0}, {"episodes_cut": 15.0}, {}),
    FaultKind.TASKS_REPEAT: ({"repeated": 14}, {"repeated": 5}, {}),
    FaultKind.EVALUATED_ON_TRAINED: (
        {"evaluated": spread(0.5, 0.5, 40), "evaluated_known": 30},
        {"evaluated": spread(0.5, 0.5, 40), "evaluated_known": 2},
        {},
    ),
    FaultKind.LR_TOO_HIGH: (
        {"rewards": spread(0.1), "grad_norm": 4.0, "entropy": 2.0},
        {"rewards": spread(0.1)},  # without turbulence the tasks are harder
        {},
    ),
    FaultKind.LR_TOO_LOW: ({"lr": 1e-9}, {"lr": 2e-7}, {"lr": 1e-9}),
    FaultKind.NOT_FINITE: ({"updates_left_out": 1.0}, {"updates_left_out": 0.0}, {}),
    FaultKind.GRADIENT_CLIPPED: ({"grad_norm": 9.0}, {"grad_norm": 1.2}, {"grad_norm": 9.0}),
    FaultKind.KL_RUNAWAY: ({"kl_reference": 0.5}, {"kl_reference": 0.02}, {}),
    FaultKind.ENTROPY_COLLAPSE: ({"entropy": 0.05}, {"entropy": 0.05, "successes": spread(0.9)}, {}),
    FaultKind.ENTROPY_RISES: ({"entropy": 1.5}, {"entropy": 0.6}, {}),
    FaultKind.SAMPLER_MISMATCH: ({"kl_sampler": 0.05}, {"kl_sampler": 0.005}, {}),
    FaultKind.STALE: ({"stale": 40}, {"stale": 4}, {}),
    FaultKind.FOLLOWS_LENGTH: (
        {"lengths": correlated(0.7), "tokens": spread(700, 100)}, {"lengths": correlated(0.7)}, {},
    ),
    FaultKind.ANSWERS_GROW: ({"tokens": spread(900, 100)}, {"tokens": spread(900, 100), "successes": spread(0.9)}, {}),
    FaultKind.ANSWERS_SHRINK: ({"tokens": spread(60, 20)}, {"tokens": spread(60, 20), "successes": spread(0.9)}, {}),
    FaultKind.ONE_PART_RISES: (
        metrics(reward_form=spread(0.95), reward_answer=spread(0.5)),
        metrics(reward_form=spread(0.95), reward_answer=spread(0.8)),
        {},
    ),
    FaultKind.ALWAYS_YES: (metrics(reward_form=spread(1, 0)), metrics(reward_form=spread(0.99, 0.1)), {}),
    FaultKind.EVALUATION_FALLS: (
        {"evaluated": spread(0.1, 0.3, 100)},
        {"evaluated": spread(0.45, 0.5, 100)},
        {"evaluated": spread(0.5, 0.5, 100)},
    ),
    FaultKind.REWARD_FALLS: ({"rewards": spread(0.1)}, {"rewards": spread(0.4)}, {}),
    FaultKind.REWARD_JUMPS: ({"rewards": spread(0.95, 0.2)}, {"rewards": spread(0.56)}, {}),
    FaultKind.DUPLICATE_ANSWERS: (answers(duplicates=[0.0] * 15), answers(duplicates=[1.0] * 16), {}),
    FaultKind.CONSTANT_PROMPT: (answers(same_prompt=4), answers(same_prompt=2), {}),
    FaultKind.CONSTANT_ANSWER: (answers(constant=4), answers(constant=2), {}),
    FaultKind.LEAKED_ANSWER: (answers(leaked=11), answers(leaked=11), {}),
    FaultKind.REWARDED_PHRASE: (
        answers(phrases={7: (0.5, 0.9, 0.1)}) | {"rewards": spread(0.6)}, answers(phrases={7: (0.5, 0.5, 0.5)}), {},
    ),
    FaultKind.TRAINER_WAITS: ({"collecting_s": 2000.0}, {"collecting_s": 300.0}, {}),
    FaultKind.SAMPLER_WAITS: ({"training_s": 2000.0}, {"training_s": 300.0}, {}),
    FaultKind.STRAGGLERS: ({"slowest_s": 900.0, "collecting_s": 910.0}, {"slowest_s": 90.0, "collecting_s": 110.0}, {}),
}  # fmt: skip


def trainer(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"trainer": {"lr": 1e-6} | settings})


def kinds_of(steps: list[StepFigures], job: RunConfig = JOB) -> set[FaultKind]:
    return {finding.kind for finding in at_step(steps, len(steps), job)}


def test_an_ordinary_run_has_no_finding() -> None:
    assert diagnose(run_of({}), JOB) == []


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(FaultKind)


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_is_found_and_its_healthy_neighbour_is_not(kind: FaultKind) -> None:
    fault, neighbour, before = CASES[kind]
    steps = run_of(fault, before)
    assert kind in kinds_of(steps)
    (finding,) = (each for each in at_step(steps, STEPS, JOB) if each.kind == kind)
    assert finding.figure
    assert finding.advice
    assert finding.seq == 10 * finding.step
    assert finding.step == STEPS - FAULTY + 1 or before
    calm = {FaultKind.LR_TOO_LOW, FaultKind.GRADIENT_CLIPPED}  # what they look at lasts longer than the newest steps
    healthy = run_of(neighbour, neighbour if kind in calm | {FaultKind.LEAKED_ANSWER} else before)
    assert kind not in kinds_of(healthy)


def test_what_a_job_does_on_purpose_is_no_fault() -> None:
    alone = run_of({"groups_of_one": 16}, {"groups_of_one": 16})
    assert FaultKind.GROUPS_OF_ONE not in kinds_of(alone, trainer(adv_estimator="reinforce_plus_plus"))
    summed = run_of({"grad_norm": 900.0}, {"grad_norm": 900.0})
    assert FaultKind.GRADIENT_CLIPPED not in kinds_of(summed, trainer(loss_aggregation="token_sum"))
    warm = run_of({"lr": 1e-8}, {"lr": 1e-8})
    assert FaultKind.LR_TOO_LOW not in kinds_of(warm, trainer(warmup_steps=STEPS))
    stale = run_of({"kl_sampler": 0.02, "staleness_mean": 1.0}, {"staleness_mean": 1.0})
    assert FaultKind.SAMPLER_MISMATCH not in kinds_of(stale)


def test_a_cause_is_told_from_its_consequences_and_from_what_began_long_before() -> None:
    def finding(kind: FaultKind, step: int) -> RunFinding:
        return RunFinding(kind=kind, figure="", advice="", step=step, seq=step, until=step + 5)

    cause, effect = finding(FaultKind.FAILURES_REWARDED, 20), finding(FaultKind.TOO_HARD, 22)
    (shown,) = explained([effect, cause])
    assert (shown.kind, shown.consequences) == (FaultKind.FAILURES_REWARDED, (effect,))
    before, after = finding(FaultKind.TOO_HARD, 3), finding(FaultKind.TOO_HARD, 60)
    assert [each.kind for each in explained([cause, before])] == [FaultKind.TOO_HARD, FaultKind.FAILURES_REWARDED]
    assert [each.kind for each in explained([cause, after])] == [FaultKind.FAILURES_REWARDED, FaultKind.TOO_HARD]


def test_no_two_kinds_explain_each_other() -> None:
    assert not [
        (kind, other) for kind, others in EXPLAINS.items() for other in others if kind in EXPLAINS.get(other, ())
    ]


def test_a_finding_has_the_step_at_which_it_began_and_was_last_seen() -> None:
    healthy = run_of({})
    steps = [row(step, updates_left_out=1.0) if 10 <= step <= 14 else healthy[step - 1] for step in range(1, STEPS + 1)]
    (finding,) = diagnose(steps, JOB)
    assert (finding.kind, finding.step) == (FaultKind.NOT_FINITE, 10)
    assert 14 <= finding.until < STEPS


NUMBERS = (0.0, 1.0, -1.0, 0.5, 1e-9, 3e8, 1e300, -1e300, inf, -inf, nan)
TRAINER = ("entropy", "grad_norm", "clip_fraction", "kl_reference", "kl_sampler", "kl_sampler_first", "staleness_mean",
           "lr", "episodes", "importance_capped", "episodes_cut", "updates_left_out")  # fmt: skip
METRICS = ("reward/a", "reward/b", "tool_calls", "tool_failures", "truncated", "x")


def any_step(chance: Random) -> StepFigures:
    """Return a step of which nothing is certain but the types."""

    def number() -> float:
        return chance.choice(NUMBERS) if chance.random() < 0.3 else chance.expovariate(1.0)

    def count() -> int:
        return chance.choice((0, 1, chance.randrange(200)))

    def some() -> Spread:
        return Spread(number(), count(), number())

    def named(names: Sequence[str]) -> dict[str, Spread]:
        return {name: some() for name in names if chance.random() < 0.6}

    def pairs() -> Moments:
        return Moments(count(), abs(number()), number(), abs(number()))

    read = AnswerFigures(
        rewards=[number() for _ in range(count())], duplicates=[number() for _ in range(count())],
        tasks=count(), constant=count(), same_prompt=count(), best=count(), leaked=count(),
        phrases={count(): (number(), number(), number())},
    )  # fmt: skip
    return StepFigures(
        step=count(), rewards=some(), lowest=number(), highest=number(), groups=count(), groups_of_one=count(),
        repeated=count(), silent=some(), lengths=pairs(), verdicts=pairs(), tokens=some(),
        successes=some(),
        clients=named("ab"), data_sets=named("ab"), metrics=named(METRICS), failed=count(),
        truncated=count(), ended=count(),
        aborted=Counter({chance.choice(("", "sandbox", "client")): count()}), stale=count(), unusable=count(),
        evaluated=some(), evaluated_known=count(),
        played=[EvaluatedEpisode(1, 1, f"t{count()}", "", number()) for _ in range(count())],
        median_s=number(), slowest_s=number(), collecting_s=number(), training_s=number(),
        trainer={name: number() for name in TRAINER if chance.random() < 0.7},
        answers=read if chance.random() < 0.7 else AnswerFigures(),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_no_rule_raises_on_any_prefix_of_any_run(seed: int) -> None:
    chance = Random(seed)
    steps = [any_step(chance) for _ in range(30)]
    for end in range(len(steps) + 1):
        at_step(steps, end, JOB)
    diagnose(steps, JOB)


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (
            Counter({FailureKind.SANDBOX: 80, FailureKind.CLIENT: 10}),
            f"80 of them: {FAILURES[FailureKind.SANDBOX].meaning}",
        ),
        (Counter({"": 90}), "90 of them: their clients reported no failure"),
    ],
)
def test_aborts_are_shown_with_the_words_of_their_kind_of_failure(reasons: Counter[str], words: str) -> None:
    steps = run_of({"aborted": reasons})
    (finding,) = (each for each in at_step(steps, STEPS, JOB) if each.kind == FaultKind.EPISODES_ABORTED)
    assert finding.figure == f"41% of the episodes were aborted, {words.replace('80', '400').replace('90', '450')}"


@pytest.mark.parametrize(("unusable", "is_found"), [(60, True), (6, False)])
def test_episodes_of_a_batch_that_cannot_be_trained_count_as_lost(unusable: int, is_found: bool) -> None:
    assert (FaultKind.EPISODES_ABORTED in kinds_of(run_of({"unusable": unusable}))) == is_found


def test_one_finding_names_episodes_that_were_aborted_and_those_that_were_left_out() -> None:
    steps = run_of({"aborted": Counter({FailureKind.SANDBOX: 90}), "unusable": 60})
    (finding,) = (each for each in at_step(steps, STEPS, JOB) if each.kind == FaultKind.EPISODES_ABORTED)
    assert "were aborted" in finding.figure
    assert "were left out" in finding.figure
    assert "episode.aborted" in finding.advice
    assert "trainer's log" in finding.advice


@pytest.mark.parametrize(("norm", "is_found"), [(9.0, True), (1.2, False)])
def test_a_noisy_fall_of_the_reward_is_enough_if_the_gradient_is_many_times_as_large(
    norm: float, is_found: bool
) -> None:
    steps = run_of({"rewards": spread(0.05), "grad_norm": norm})
    for each in steps[:-FAULTY]:
        each.rewards = spread(0.5 + 0.2 * (-1) ** each.step)  # so that the fall is of 2.8 standard errors
    assert (FaultKind.LR_TOO_HIGH in kinds_of(steps)) == is_found


@pytest.mark.parametrize(
    ("reward", "others", "is_found"),
    [
        (1.0, [0.0, 1.0], False),  # the model has learned the tasks
        (0.95, [0.0, 1.0], False),
        (0.4, [0.0, 1.0], True),  # every answer of the group is the same mediocre one
        (0.0, [0.0], True),
        (1.0, [1.0], False),
    ],
)
def test_equal_answers_are_a_fault_only_where_a_better_one_is_possible(
    reward: float, others: list[float], is_found: bool
) -> None:
    same = answers(rewards=[reward] * 32, duplicates=[reward] * 32) | {"lowest": min(others), "highest": max(others)}
    assert (FaultKind.DUPLICATE_ANSWERS in kinds_of(run_of(same, same))) == is_found


@pytest.mark.parametrize(("right", "wrong_duplicates", "is_found"), [(20, 12, True), (20, 3, False), (28, 4, False)])
def test_wrong_answers_that_repeat_are_found_among_right_ones_unless_few_are_wrong(
    right: int, wrong_duplicates: int, is_found: bool
) -> None:
    rewards = [1.0] * right + [0.0] * (32 - right)
    some = answers(rewards=rewards, duplicates=[1.0] * right + [0.0] * wrong_duplicates)
    assert (FaultKind.DUPLICATE_ANSWERS in kinds_of(run_of(some))) == is_found


@pytest.mark.parametrize(
    ("figures", "tokens"),
    [
        ({"kl_sampler_first": 0.05}, "the first tokens of answers"),
        ({"kl_sampler_last": 0.05}, "the last tokens of answers"),
        ({"kl_sampler": 0.05, "kl_sampler_first": 0.9}, "the same tokens"),
        ({"kl_sampler": 0.009, "kl_sampler_first": 0.02}, ""),  # few tokens differ more by chance
    ],
)
def test_a_mismatch_is_found_where_it_is(figures: dict[str, float], tokens: str) -> None:
    found = at_step(run_of(figures), STEPS, JOB)
    assert [tokens in each.figure for each in found if each.kind == FaultKind.SAMPLER_MISMATCH] == [True] * bool(tokens)


@pytest.mark.parametrize(("start", "gain", "is_found"), [(0.1, 0.02, False), (0.1, 0.0, True), (0.5, 0.0, False)])
def test_an_entropy_that_falls_as_before_is_a_collapse_once_the_reward_has_stopped_rising_early(
    start: float, gain: float, is_found: bool
) -> None:
    steps = run_of({})
    for at, each in enumerate(steps):
        learned = 0.02 * min(at, STEPS - FAULTY - 1) + gain * max(0, at - STEPS + FAULTY + 1)
        each.rewards = each.successes = spread(start + learned + 0.002 * (-1) ** at)
        each.trainer["entropy"] = 3.0 * 0.88**at
    assert (FaultKind.ENTROPY_COLLAPSE in kinds_of(steps)) == is_found


@pytest.mark.parametrize(
    ("level", "successes", "kind"),
    [
        (0.0, spread(0.0), FaultKind.TOO_HARD),  # such as minus the number of right answers, none of which is left
        (0.0, Spread(), FaultKind.TOO_EASY),  # no successes are reported
        (0.0, spread(0.9), FaultKind.TOO_EASY),
        (-1.0, spread(0.0), FaultKind.TOO_HARD),
    ],
)
def test_tasks_are_not_too_easy_if_the_highest_reward_is_that_of_failures(
    level: float, successes: Spread, kind: FaultKind
) -> None:
    same = {"silent": spread(level, 0, 15), "lowest": -1.0, "highest": 0.0, "successes": successes}
    assert kinds_of(run_of(same, same)) & {FaultKind.TOO_EASY, FaultKind.TOO_HARD} == {kind}


@pytest.mark.parametrize(
    ("others", "kind"), [(0.5, FaultKind.TOO_EASY), (0.6, FaultKind.TOO_EASY), (0.9, FaultKind.REWARD_JUMPS)]
)
def test_a_jump_of_the_groups_without_a_signal_alone_is_said_to_be_one_of_easy_tasks(
    others: float, kind: FaultKind
) -> None:
    jumped = run_of({"silent": spread(1.0, 0.0, 11), "rewards": spread((11 + 5 * others) / 16)})
    assert [finding.kind for finding in diagnose(jumped, JOB)] == [kind]


def test_a_part_of_the_reward_is_compared_with_its_own_trend_and_with_the_other_parts() -> None:
    def run(form: float, answer: float) -> list[StepFigures]:
        steps = run_of({})
        for number, each in enumerate(steps):
            late = number >= STEPS - FAULTY
            each.metrics["reward/form"] = spread(0.6 + 0.008 * number + form * late + 0.01 * (-1) ** number, 0.3)
            each.metrics["reward/answer"] = each.successes = spread(0.3 + answer * late + 0.02 * (-1) ** number)
        return steps

    assert FaultKind.ONE_PART_RISES not in kinds_of(run(form=0.0, answer=0.0)), "it goes on as before"
    assert FaultKind.ONE_PART_RISES not in kinds_of(run(form=0.15, answer=0.15))
    assert FaultKind.ONE_PART_RISES in kinds_of(run(form=0.15, answer=0.0))


def test_a_fall_that_one_evaluation_is_too_small_to_show_is_found_after_two() -> None:
    steps = run_of({})
    for each in steps[::5]:
        each.evaluated = spread(0.36 if each.step > 15 else 0.5, 0.5, 100)
    assert FaultKind.EVALUATION_FALLS not in {each.kind for each in at_step(steps, 20, JOB)}
    assert FaultKind.EVALUATION_FALLS in {each.kind for each in at_step(steps, 25, JOB)}


@pytest.mark.parametrize(("lost", "is_found"), [(0.0, True), (0.09, True), (0.11, False)])
def test_evaluations_that_fall_with_a_noisy_training_reward_are_not_a_fault_of_their_own(
    lost: float, is_found: bool
) -> None:
    steps = run_of({"evaluated": spread(0.3, 0.4, 500)}, {"evaluated": spread(0.5, 0.4, 500)})
    for number, each in enumerate(steps):
        each.rewards = spread(0.5 + (-0.15, 0.0, 0.15)[number % 3] - lost * (number >= STEPS - FAULTY))
    assert (FaultKind.EVALUATION_FALLS in {each.kind for each in at_step(steps, STEPS, JOB)}) == is_found


def test_a_fault_explains_evaluations_that_fall_slowly_after_it_was_last_seen() -> None:
    cause = RunFinding(kind=FaultKind.REWARD_DISAGREES, figure="", advice="", step=30, seq=1, until=40)
    effect = RunFinding(kind=FaultKind.EVALUATION_FALLS, figure="", advice="", step=55, seq=2, until=60)
    (shown,) = explained([cause, effect])
    assert [each.kind for each in shown.consequences] == [FaultKind.EVALUATION_FALLS]
    assert len(explained([cause, msgspec.structs.replace(effect, step=66)])) == 2


@pytest.mark.parametrize(("more", "is_found"), [(0, True), (40, True), (60, False)])
def test_a_fall_is_looked_for_task_by_task_unless_most_tasks_are_others(more: int, is_found: bool) -> None:
    steps = run_of({})
    for each in steps[::5]:
        late = each.step > 20
        solved = [number % 2 == 0 and not (late and number < 20) for number in range(100)]
        names = [number + 1000 * (late and number >= 100 - more) for number in range(100)]
        each.played = [
            EvaluatedEpisode(each.seq, each.step, f"task-{name}", "", float(is_solved))
            for name, is_solved in zip(names, solved, strict=True)
        ]
        each.evaluated = spread(sum(solved) / 100, (sum(solved) / 100 * (1 - sum(solved) / 100)) ** 0.5, 100)
    assert (FaultKind.EVALUATION_FALLS in kinds_of(steps)) == is_found


@pytest.mark.parametrize(
    ("stuck", "is_found"), [(spread(0.0, 0.0, 8), True), (spread(0.1, 0.1, 8), False), (spread(0.6, 0.0, 8), False)]
)
def test_a_client_with_one_low_reward_is_found_without_earlier_steps(stuck: Spread, is_found: bool) -> None:
    steps = run_of({})[:3]
    for each in steps:
        each.clients = {"a": stuck, "b": spread(0.5, 0.3, 8)}
    assert (FaultKind.CLIENT_FAILS in kinds_of(steps)) == is_found
    for each in steps:
        each.clients["b"] = spread(0.02, 0.1, 800)
    assert FaultKind.CLIENT_FAILS not in kinds_of(steps), "few of its tasks are expected to be solved"


@pytest.mark.parametrize(("correlation", "is_found"), [(0.0, True), (0.3, False)])
def test_rewards_that_have_had_nothing_to_do_with_success_from_the_first_step_are_found(
    correlation: float, is_found: bool
) -> None:
    same = {"verdicts": correlated(correlation)}
    found = [each for each in diagnose(run_of(same, same), JOB) if each.kind == FaultKind.REWARD_DISAGREES]
    assert [each.step for each in found] == [1] * is_found


@pytest.mark.parametrize(
    ("rate", "settings", "words"),
    [
        (3e-6, {"lr": 3e-3, "total_steps": 9, "lr_schedule": "linear"}, "total_steps (now 9)"),
        (1e-6, {"lr": 3e-3, "warmup_steps": 100_000}, "warmup_steps (now 100000)"),
        (1e-9, {"lr": 1e-9}, "set trainer.lr to 1e-06"),
    ],
)
def test_a_rate_that_a_schedule_made_too_low_is_not_answered_with_the_usual_rate(
    rate: float, settings: Fields, words: str
) -> None:
    job = trainer(**settings)
    (finding,) = (each for each in diagnose(run_of({"lr": rate}, {"lr": rate}), job))
    assert finding.kind == FaultKind.LR_TOO_LOW
    assert words in finding.advice


def test_a_template_that_drops_the_task_from_the_first_step_is_found_as_the_cause() -> None:
    same = answers(same_prompt=4, constant=4)
    (finding,) = diagnose(run_of(same, same), JOB)
    assert (finding.kind, finding.step) == (FaultKind.CONSTANT_PROMPT, 1)
    assert [each.kind for each in finding.consequences] == [FaultKind.CONSTANT_ANSWER]


@pytest.mark.parametrize(
    ("age", "distance", "kinds"),
    [(3.0, 0.6, {FaultKind.STALE}), (3.0, 0.04, set()), (0.0, 0.6, {FaultKind.SAMPLER_MISMATCH})],
)
def test_old_samples_that_the_policy_has_left_are_told_from_a_sampler_that_computes_otherwise(
    age: float, distance: float, kinds: set[FaultKind]
) -> None:
    same = {"staleness_mean": age, "kl_sampler": distance, "importance_capped": 0.04}
    assert {finding.kind for finding in diagnose(run_of(same, same), JOB)} == kinds
