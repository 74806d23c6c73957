"""Rates, graduation, return, review and tiers, with values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus.curriculum.choosing import choose, open_tasks, priority
from bombus.curriculum.deciding import RecordResult, decide
from bombus.curriculum.events import (
    AnyCurriculumEvent,
    ResultRecorded,
    TaskGraduated,
    TaskReturned,
    TaskReviewed,
    TierReached,
)
from bombus.curriculum.plan import FIVE_TIERS, CurriculumPlan, CurriculumTier, MasteryRules, TierRules, plan_of
from bombus.curriculum.progress import GROUPS_REMEMBERED, CurriculumProgress, decayed_rate
from bombus.errors import Code, Refused
from bombus.sdk.types import Task

TWO_TIERS = CurriculumPlan(
    tiers=(
        CurriculumTier(name="warmup", tasks=("a", "b"), rules=TierRules(results_min=5, rate_min=0.6)),
        CurriculumTier(name="beginner", tasks=("c", "d")),
    )
)
ONE_TIER = CurriculumPlan(tiers=(CurriculumTier(name="only", tasks=("a", "b", "c")),))


def after(plan: CurriculumPlan, *results: tuple[str, bool]) -> tuple[CurriculumProgress, list[AnyCurriculumEvent]]:
    """Return the progress after results, and what followed from them besides their records."""
    progress, followed = CurriculumProgress(plan), []
    for task, achieved in results:
        events = decide(RecordResult(task=task, achieved=achieved, reward=float(achieved)), progress)
        assert events[0] == ResultRecorded(task=task, achieved=achieved, reward=float(achieved))
        followed += events[1:]
        progress.fold(events)
    return progress, followed


# ---- rates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "rate"),
    [
        ([], 0.0),
        ([True], 1.0),
        ([False, True], 1 / 1.85),
        ([True, False], 0.85 / 1.85),
        ([False, True, True], 1.85 / 2.5725),  # 1 + 0.85 + 0.85^2
    ],
)
def test_a_rate_weighs_each_result_085_times_the_one_after_it(results: list[bool], rate: float) -> None:
    assert decayed_rate(results, 0.85) == pytest.approx(rate, abs=1e-12)


@given(st.lists(st.booleans(), max_size=20), st.floats(0.01, 1.0))
def test_a_rate_is_a_share_and_rises_with_a_success(results: list[bool], decay: float) -> None:
    rate = decayed_rate(results, decay)
    assert 0.0 <= rate <= 1.0 + 1e-12
    assert decayed_rate([*results, False], decay) <= rate + 1e-12
    assert decayed_rate([*results, True], decay) >= rate - 1e-12


# ---- tasks ----------------------------------------------------------------------------------------------------


def test_a_task_graduates_at_07_with_three_results_and_not_with_two() -> None:
    _, followed = after(ONE_TIER, ("a", False), ("a", True))
    assert followed == []
    _, followed = after(ONE_TIER, ("a", False), ("a", True), ("a", True))  # 0.719
    assert followed == [TaskGraduated(task="a", interval=3, due=6)]
    _, followed = after(ONE_TIER, ("a", True), ("a", False), ("a", True))  # 1.7225 / 2.5725 = 0.6696
    assert followed == []


def test_only_the_last_ten_results_count() -> None:
    progress, _ = after(ONE_TIER, *[("a", False)] * 5, *[("a", True)] * 10)
    assert progress.rate("a") == 1.0
    assert progress.of("a").results == 15


def test_reviews_double_their_interval_up_to_48_and_a_failure_begins_again() -> None:
    progress, _ = after(ONE_TIER, *[("a", True)] * 3)
    assert (progress.of("a").interval, progress.of("a").due) == (3, 6)
    intervals = []
    for _ in range(6):
        while progress.results + 1 < progress.of("a").due:
            progress.fold(decide(RecordResult(task="b", achieved=False, reward=0.0), progress))
        events = decide(RecordResult(task="a", achieved=True, reward=1.0), progress)
        progress.fold(events)
        (review,) = events[1:]
        assert isinstance(review, TaskReviewed)
        assert review.due == progress.results + review.interval
        intervals.append(review.interval)
    assert intervals == [6, 12, 24, 48, 48, 48]
    failure = decide(RecordResult(task="a", achieved=False, reward=0.0), progress)
    assert failure[1:] == [TaskReviewed(task="a", interval=3, due=progress.results + 1 + 3)]


def test_a_success_before_a_review_is_due_does_not_advance_it() -> None:
    progress, followed = after(ONE_TIER, *[("a", True)] * 4)
    assert followed == [TaskGraduated(task="a", interval=3, due=6)]
    assert progress.of("a").due == 6


def test_a_task_that_fails_after_it_has_graduated_returns_and_can_graduate_again() -> None:
    # after three successes, a failure leaves (0.85 + 0.7225 + 0.614125) / 3.186625 = 0.686
    progress, followed = after(ONE_TIER, *[("a", True)] * 3, ("a", False))
    assert followed[1:] == [TaskReturned(task="a")]
    assert not progress.of("a").has_graduated
    _, followed = after(ONE_TIER, *[("a", True)] * 3, ("a", False), ("a", True))  # 0.742
    assert followed[2:] == [TaskGraduated(task="a", interval=3, due=8)]


# ---- tiers ----------------------------------------------------------------------------------------------------


def test_a_tier_is_mastered_at_five_results_and_06() -> None:
    results = [("a", False), ("b", True), ("a", False), ("b", True)]
    _, followed = after(TWO_TIERS, *results)
    assert not any(isinstance(event, TierReached) for event in followed)
    # weights, newest first: 1, 0.85, 0.7225, 0.614125, 0.52200625; successes 1 + 0.85 + 0.614125 of 3.70863125 = 0.664
    progress, followed = after(TWO_TIERS, *results, ("b", True))
    assert followed[-1] == TierReached(tier="beginner", fast=False)
    assert progress.tier.name == "beginner"
    assert (progress.tier_results, progress.tier_recent) == (0, ())


def test_three_successes_are_the_fast_track_and_two_are_not() -> None:
    _, followed = after(TWO_TIERS, ("a", True), ("b", True))
    assert followed == []
    _, followed = after(TWO_TIERS, ("a", True), ("b", True), ("a", True))
    assert followed == [TierReached(tier="beginner", fast=True)]


def test_a_tier_that_is_mastered_by_the_ordinary_rule_too_is_not_reached_fast() -> None:
    rules = TierRules(results_min=3, rate_min=0.6)
    tiers = (CurriculumTier(name="one", tasks=("a",), rules=rules), CurriculumTier(name="two", tasks=("b",)))
    _, followed = after(CurriculumPlan(tiers=tiers), *[("a", True)] * 3)
    assert followed[-1] == TierReached(tier="two", fast=False)


def test_results_of_other_tiers_do_not_count_for_the_current_one() -> None:
    progress, followed = after(TWO_TIERS, *[("c", True)] * 9)
    assert progress.tier.name == "warmup"
    assert followed[0] == TaskGraduated(task="c", interval=3, due=6)


def test_a_result_of_an_earlier_tier_does_not_master_the_current_one() -> None:
    tiers = tuple(CurriculumTier(name=name, tasks=(name,)) for name in ("one", "two", "three"))
    _, followed = after(CurriculumPlan(tiers=tiers), *[("one", True)] * 3, ("two", True), ("two", True), ("one", True))
    assert [event for event in followed if isinstance(event, TierReached)] == [TierReached(tier="two", fast=True)]


def test_nothing_comes_after_the_last_tier() -> None:
    progress, followed = after(ONE_TIER, *[("a", True)] * 20)
    assert not any(isinstance(event, TierReached) for event in followed)
    assert progress.tier.name == "only"


def test_the_five_tiers_have_the_reference_s_rules() -> None:
    rules = {name: (rules.results_min, rules.rate_min) for name, rules in FIVE_TIERS.items()}
    assert rules == {
        "warmup": (5, 0.6),
        "beginner": (5, 0.6),
        "intermediate": (8, 0.65),
        "advanced": (10, 0.7),
        "expert": (10, 0.7),
    }


# ---- priorities -----------------------------------------------------------------------------------------------


def test_priorities_by_hand() -> None:
    progress, _ = after(ONE_TIER, ("a", False), ("b", True), ("b", False))
    assert priority("c", progress) == 100.0  # never tried
    assert priority("a", progress) == 50.0  # never achieved, two results ago
    assert priority("b", progress) == pytest.approx(50 * (1 - 0.85 / 1.85) - 20)
    progress, _ = after(ONE_TIER, ("a", False), ("b", False))
    assert priority("a", progress) == 30.0  # never achieved, one result ago
    progress, _ = after(ONE_TIER, *[("a", True)] * 3, ("b", False), ("c", False))
    assert priority("a", progress) == 0.0  # due at six results, and there are five
    progress.fold(decide(RecordResult(task="b", achieved=False, reward=0.0), progress))
    assert priority("a", progress) == 30.0  # due at six results, and never failed


def test_what_is_new_comes_first_then_what_is_weak() -> None:
    progress, _ = after(ONE_TIER, ("a", True), ("b", False), ("a", True), ("a", True))
    assert choose(progress, seed=0, draw=0) == "c"
    assert choose(progress, seed=0, draw=0, taken={"c"}) == "b"
    assert choose(progress, seed=0, draw=0, taken={"a", "b", "c"}) is None


def test_earlier_tiers_come_back_when_they_are_due_or_have_returned() -> None:
    progress, _ = after(TWO_TIERS, *[("a", True)] * 3)
    assert list(open_tasks(progress)) == ["c", "d"]  # b was left behind
    for task in ("c", "c", "c"):
        progress.fold(decide(RecordResult(task=task, achieved=False, reward=0.0), progress))
    assert list(open_tasks(progress)) == ["c", "d", "a"]
    progress.fold(decide(RecordResult(task="a", achieved=False, reward=0.0), progress))
    assert progress.of("a").has_returned
    assert list(open_tasks(progress)) == ["c", "d", "a"]
    progress.fold(decide(RecordResult(task="a", achieved=True, reward=1.0), progress))
    assert list(open_tasks(progress)) == ["c", "d"]


# ---- what is refused, and what is recorded once -------------------------------------------------------------------


def test_c1_a_group_is_recorded_once() -> None:
    progress = CurriculumProgress(ONE_TIER)
    command = RecordResult(task="a", achieved=True, reward=1.0, group="g1")
    progress.fold(decide(command, progress))
    assert decide(command, progress) == []
    assert progress.results == 1


def test_the_newest_groups_are_remembered_and_the_oldest_are_forgotten() -> None:
    progress = CurriculumProgress(ONE_TIER)
    for number in range(GROUPS_REMEMBERED + 1):
        progress.evolve(ResultRecorded(task="a", achieved=True, reward=1.0, group=str(number)))
    assert len(progress.groups) == GROUPS_REMEMBERED
    assert decide(RecordResult(task="a", achieved=True, reward=1.0, group=str(GROUPS_REMEMBERED)), progress) == []
    assert decide(RecordResult(task="a", achieved=True, reward=1.0, group="1"), progress) == []
    assert decide(RecordResult(task="a", achieved=True, reward=1.0, group="0"), progress) != []


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (RecordResult(task="x", achieved=True, reward=1.0), Code.MALFORMED),
        (RecordResult(task="a", achieved=True, reward=math.nan), Code.BAD_REWARD),
        (RecordResult(task="a", achieved=True, reward=math.inf), Code.BAD_REWARD),
        (RecordResult(task="a", achieved=True, reward=1.0, group="g" * 513), Code.MALFORMED),
    ],
)
def test_a_result_that_cannot_be_meant_is_refused(command: RecordResult, code: Code) -> None:
    with pytest.raises(Refused) as refused:
        decide(command, CurriculumProgress(ONE_TIER))
    assert refused.value.code == code


def test_rules_that_make_no_sense_are_refused_when_they_are_made() -> None:
    with pytest.raises(ValueError, match=r"rate_min is 1\.5: it must be from 0 to 1"):
        TierRules(rate_min=1.5)
    with pytest.raises(ValueError, match="decay is nan"):
        MasteryRules(decay=math.nan)
    with pytest.raises(ValueError, match="review_longest is 2"):
        MasteryRules(review_longest=2)
    with pytest.raises(ValueError, match="'a' is in the curriculum twice"):
        CurriculumPlan(tiers=(CurriculumTier(name="x", tasks=("a", "a")),))
    with pytest.raises(ValueError, match="the number of tiers is 0"):
        CurriculumPlan(tiers=())
    with pytest.raises(ValueError, match="'x' has no tasks"):
        CurriculumPlan(tiers=(CurriculumTier(name="x", tasks=()),))


def test_a_plan_is_made_of_the_tiers_that_tasks_name() -> None:
    tasks = [Task(task_id=tier[0], metadata={"tier": tier}) for tier in ("expert", "warmup")]
    assert [(tier.name, tier.tasks) for tier in plan_of(tasks).tiers] == [("warmup", ("w",)), ("expert", ("e",))]
    with pytest.raises(ValueError, match="metadata\\['tier'\\] None: it must be one of warmup"):
        plan_of([Task(task_id="x")])


# ---- properties -----------------------------------------------------------------------------------------------

RESULTS = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=120)


@given(RESULTS)
def test_a_fold_of_the_events_is_the_same_progress(results: list[tuple[str, bool]]) -> None:
    progress, events = CurriculumProgress(TWO_TIERS), []
    for task, achieved in results:
        events += decide(RecordResult(task=task, achieved=achieved, reward=0.5), progress)
        progress = CurriculumProgress(TWO_TIERS).fold(events)
        tier_before = progress.tier_index
    again = CurriculumProgress(TWO_TIERS).fold(events)
    assert vars(again) == vars(progress)
    assert again.results == len(results)
    assert not results or again.tier_index >= tier_before


@given(RESULTS, st.integers(0, 3), st.sets(st.sampled_from("abcd")))
def test_what_is_chosen_is_open_free_and_has_the_highest_priority(
    results: list[tuple[str, bool]], seed: int, taken: set[str]
) -> None:
    progress, _ = after(TWO_TIERS, *results)
    free = set(open_tasks(progress)) - taken
    chosen = choose(progress, seed, progress.results, taken)
    assert (chosen is None) == (not free)
    if chosen is not None:
        assert chosen in free
        assert priority(chosen, progress) == max(priority(task, progress) for task in free)


@given(RESULTS)
def test_tiers_are_only_ever_reached_in_order_and_graduated_tasks_have_a_review(
    results: list[tuple[str, bool]],
) -> None:
    progress, followed = after(TWO_TIERS, *results)
    assert [event.tier for event in followed if isinstance(event, TierReached)] in ([], ["beginner"])
    for task in progress.tasks.values():
        assert task.has_graduated == (task.due > 0)
        assert not (task.has_graduated and task.has_returned)
        assert task.interval in (0, 3, 6, 12, 24, 48)
