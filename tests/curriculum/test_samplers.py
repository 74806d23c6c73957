"""Samplers: the same tasks for the same seed, none given twice at a time, and results that change what comes next."""

import itertools
import math
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from bombus.curriculum.curriculum import Curriculum
from bombus.curriculum.plan import plan_of
from bombus.curriculum.samplers import CurriculumSampler, UniformSampler, result_of_group
from bombus.sdk.types import Task, WorkflowOutput

TASKS = [
    Task(task_id=f"{tier}{number}", metadata={"tier": tier}) for tier in ("warmup", "expert") for number in range(4)
]
WON, LOST = WorkflowOutput(reward=1.0), WorkflowOutput(reward=0.0)


def sampler(seed: int = 0, path: Path | None = None) -> CurriculumSampler:
    return CurriculumSampler(Curriculum(plan_of(TASKS), path), TASKS, seed=seed)


def played(one: UniformSampler | CurriculumSampler, count: int, skill: int = 2) -> list[str]:
    """Return the ids of the next tasks, each of which is won where its number is below `skill`."""
    ids = []
    for task in itertools.islice(one, count):
        ids.append(task.task_id)
        one.record(task, [WON if int(task.task_id[-1]) < skill else LOST] * 2)
    return ids


def test_a_uniform_sampler_gives_each_task_once_before_any_again() -> None:
    uniform = UniformSampler(TASKS, seed=1)
    ids = played(uniform, 24)
    assert all(sorted(ids[at : at + 8]) == sorted(task.task_id for task in TASKS) for at in (0, 8, 16))
    assert ids[:8] != ids[8:16]
    assert ids == played(UniformSampler(TASKS, seed=1), 24)
    assert ids != played(UniformSampler(TASKS, seed=2), 24)
    with pytest.raises(ValueError, match="there are no tasks"):
        UniformSampler([])


def test_a_curriculum_gives_the_same_tasks_for_the_same_seed_and_results() -> None:
    ids = played(sampler(seed=1), 60)
    assert ids == played(sampler(seed=1), 60)
    assert ids != played(sampler(seed=2), 60)
    assert sorted(ids[:4]) == ["warmup0", "warmup1", "warmup2", "warmup3"]  # what is new comes first


def test_a_curriculum_reaches_the_next_tier_when_it_is_mastered() -> None:
    one = sampler()
    assert sorted(played(one, 3, skill=4))[0].startswith("warmup")
    assert one.curriculum.figures().tier == "expert"
    assert all(name.startswith("expert") for name in played(one, 4, skill=4))
    assert (
        one.curriculum.figures().line().startswith("tier expert: 4 results at a rate of 1.00; 0 of 8 tasks graduated")
    )


def test_a_run_that_is_cut_in_two_has_the_same_tasks_as_a_whole_one(tmp_path: Path) -> None:
    whole = played(sampler(), 50)
    first = sampler(path=tmp_path / "c.jsonl")
    parts = played(first, 20)
    first.curriculum.close()
    assert parts + played(sampler(path=tmp_path / "c.jsonl"), 30) == whole


def test_a_task_is_not_given_again_while_its_group_runs_unless_all_do() -> None:
    one = sampler()
    given = [next(one) for _ in range(6)]
    assert len({task.task_id for task in given[:4]}) == 4
    assert [task.task_id for task in given[4:]] == [task.task_id for task in given[:2]]  # the oldest first
    one.give_back(given[3])
    assert next(one) == given[3]


def test_c1_a_group_is_one_result_and_drawing_changes_nothing() -> None:
    one = sampler()
    task = next(one)
    next(one)
    assert one.curriculum.progress.results == 0
    one.record(task, [WON, LOST, None, WON], group="g")
    one.record(task, [WON, LOST, None, WON], group="g")
    assert one.curriculum.progress.results == 1
    assert one.curriculum.progress.of(task.task_id).rewards == pytest.approx(2 / 3)


def test_a_group_without_a_score_says_nothing_of_its_task() -> None:
    one = sampler()
    task = next(one)
    one.record(task, [None, WorkflowOutput(reward=None)])
    assert one.curriculum.progress.results == 0


@pytest.mark.parametrize(
    ("outputs", "result"),
    [
        ([], None),
        ([None], None),
        ([WorkflowOutput(reward=[])], None),
        ([WON, LOST], (True, 0.5)),
        ([WON, LOST, LOST], (False, 1 / 3)),
        ([WorkflowOutput(reward=0.4, is_success=True), None], (True, 0.4)),
        ([WorkflowOutput(reward=2.0, is_success=False)], (False, 2.0)),
        ([WorkflowOutput(reward=[0.0, 1.0])], (False, 0.5)),
        ([WorkflowOutput(reward={"a": 1.0, "b": 2.0})], (True, 1.5)),
        ([WorkflowOutput(reward={})], None),
        ([WorkflowOutput(reward=math.nan), LOST], (False, 0.0)),
        ([WorkflowOutput(reward=[1.0, math.inf]), WON], (True, 1.0)),
        ([WorkflowOutput(reward=-math.inf)], None),
    ],
)
def test_the_result_of_a_group(outputs: list[WorkflowOutput | None], result: tuple[bool, float] | None) -> None:
    assert result_of_group(outputs) == result


def test_an_episode_whose_reward_is_not_a_number_does_not_end_the_training_loop() -> None:
    one = sampler()
    task = next(one)
    one.record(task, [WorkflowOutput(reward=math.nan)])
    assert one.curriculum.progress.results == 0
    one.record(task, [WorkflowOutput(reward=math.nan), WON])
    assert one.curriculum.progress.of(task.task_id).rewards == 1.0


def test_a_task_whose_group_came_to_nothing_is_not_given_for_ever() -> None:
    one = sampler()
    given = set()
    for task in itertools.islice(one, 40):
        given.add(task.task_id)
        one.record(task, [None])
    assert given == {"warmup0", "warmup1", "warmup2", "warmup3"}


def test_threads_that_share_a_sampler_are_given_different_tasks() -> None:
    given: list[str] = []

    class Interrupted(Curriculum):
        def choose(self, seed: int, draw: int, taken: Collection[str] = ()) -> str | None:
            chosen = super().choose(seed, draw, taken)
            if other.ident is None:
                other.start()
                other.join(0.2)  # it waits for us
            return chosen

    shared = CurriculumSampler(Interrupted(plan_of(TASKS)), TASKS)
    other = threading.Thread(target=lambda: given.append(next(shared).task_id))
    given.append(next(shared).task_id)
    other.join()
    assert len(set(given)) == 2


def test_a_tier_that_another_thread_reaches_while_all_tasks_run_does_not_end_the_tasks() -> None:
    class Interrupted(Curriculum):
        def open_tasks(self) -> list[str]:
            if self.progress.tier_index == 0:
                for _ in range(3):
                    self.record_result("warmup0", True, 1.0)  # as a thread beside this one does
            return super().open_tasks()

    shared = CurriculumSampler(Interrupted(plan_of(TASKS)), TASKS)
    given = [next(shared).task_id for _ in range(5)]
    assert sorted(given[:4]) == ["warmup0", "warmup1", "warmup2", "warmup3"]
    assert not given[4].startswith("warmup")


def test_tasks_have_to_be_those_of_the_curriculum() -> None:
    with pytest.raises(ValueError, match="the curriculum has the task 'expert0', which is not among"):
        CurriculumSampler(Curriculum(plan_of(TASKS)), TASKS[:4])
