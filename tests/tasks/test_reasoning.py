"""reasoning-gym's generators as ready tasks: draws, splits, and the verifier's score of an answer."""

import pytest

from bombus.environments.kinds import MethodFailed, RolloutScores, Transcript
from bombus.environments.plain.environment import PlainEnvironment
from bombus.errors import Refused
from bombus.hive.failures import FailureKind
from bombus.sdk.types import Task
from bombus.tasks.entries import entry_of
from bombus.tasks.kinds import TaskDraw, TaskSplit
from bombus.tasks.reasoning import FAMILY, FLAWS, GOLD_SCORES_NOTHING, ReasoningPuzzle, answer_in, score_of
from bombus.tasks.registry import open_tasks
from tests.effort import effort

GENERATORS = [name.name for name in FAMILY.names()][:: effort(4, 1)]
LEGS = open_tasks("reasoning_gym:leg_counting")


def drawn(size: int, seed: int = 0, split: TaskSplit = TaskSplit.TRAIN, name: str = "leg_counting") -> list[Task]:
    return open_tasks(f"reasoning_gym:{name}").draw(TaskDraw(size=size, seed=seed, split=split))


async def scored(task: Task, reply: str) -> RolloutScores:
    environment = PlainEnvironment(LEGS.environment())
    await environment.open(task)
    scores = await environment.score(Transcript(messages=[{"role": "assistant", "content": reply}]))
    await environment.close()
    return scores


def test_the_same_draw_gives_the_same_tasks_and_a_larger_one_begins_with_them() -> None:
    assert drawn(5) == drawn(5)
    assert drawn(8)[:5] == drawn(5)
    assert drawn(2)[1].task_id == "reasoning_gym:leg_counting/train/0/1"


def test_other_seeds_and_the_other_split_give_other_tasks() -> None:
    questions = [{task.main_query for task in drawn(50, seed, split)} for seed in (0, 1) for split in TaskSplit]
    assert all(not one & other for at, one in enumerate(questions) for other in questions[:at])


async def test_a_reply_is_scored_by_the_verifier() -> None:
    task = drawn(1)[0]
    (gold,) = ReasoningPuzzle().gold(task)
    right = await scored(task, f"Let me count. {gold}")
    assert (right.reward, right.is_success, right.metrics) == (1.0, True, {"has_answer": 1.0})
    wrong = await scored(task, "<answer>-1</answer>")
    assert (wrong.reward, wrong.is_success) == (0.0, False)
    plain = await scored(task, gold.removeprefix("<answer>").removesuffix("</answer>"))
    assert (plain.reward, plain.metrics) == (1.0, {"has_answer": 0.0})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("<answer> 42 </answer>", "42"),
        ("<answer>1</answer> no: <answer>2</answer>.", "2"),
        ("<answer>cut", "cut"),
        ("It goes into <answer> tags: <answer>5</answer>", "5"),
        ("<answer>5</answer>, which I put into <answer> tags.", "5"),
        ("First <answer> and then <answer>cut", "cut"),
        ("", ""),
    ],
)
def test_the_answer_of_a_reply(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize("name", GENERATORS)
async def test_the_gold_answer_of_every_generator_is_worth_1_but_for_those_that_are_marked(name: str) -> None:
    (task,) = drawn(1, name=name)
    environment = PlainEnvironment(ReasoningPuzzle())
    await environment.open(task)
    (gold,) = ReasoningPuzzle().gold(task)
    scores = await environment.score(Transcript(messages=[{"role": "assistant", "content": gold}]))
    await environment.close()
    assert scores.reward == 1.0 or (name in GOLD_SCORES_NOTHING and scores.reward <= 0.01), scores


async def test_an_answer_that_a_verifier_cannot_read_is_wrong() -> None:
    (task,) = drawn(1, name="prime_factorization")
    environment = PlainEnvironment(ReasoningPuzzle())
    await environment.open(task)
    scores = await environment.score(Transcript(messages=[{"role": "assistant", "content": "no idea"}]))
    assert scores.reward == 0.0


def test_a_verifier_that_cannot_judge_the_correct_answer_either_has_not_judged() -> None:
    entry = {**entry_of("word_sorting", 0, 0), "metadata": None}
    with pytest.raises(MethodFailed, match="cannot judge the correct answer either") as failed:
        score_of("word_sorting", "no idea", entry)
    assert failed.value.failure == FailureKind.GRADER


async def test_a_reply_that_only_repeats_the_question_is_worth_nothing() -> None:
    # The verifier of knights_knaves gives 0.65 for the names and roles that stand in the question.
    for task in drawn(6, name="knights_knaves"):
        environment = PlainEnvironment(ReasoningPuzzle())
        await environment.open(task)
        for reply in (task.main_query, f"<answer>I repeat: {task.main_query}</answer>"):
            scores = await environment.score(Transcript(messages=[{"role": "assistant", "content": reply}]))
            assert scores.reward == 0.0
        await environment.close()


@pytest.mark.parametrize("answer", ["nan", "(NaN)", "n a n", "nan+nanj", "1+nani"])
def test_an_answer_that_is_not_a_number_is_not_taken_for_any_number(answer: str) -> None:
    # The verifier of complex_arithmetic gives 1 for each of them, whatever the question.
    assert score_of("complex_arithmetic", answer, entry_of("complex_arithmetic", 0, 0)) == 0.0


def test_an_answer_that_has_nan_in_a_word_is_read() -> None:
    entry = {**entry_of("caesar_cipher", 0, 0), "answer": "NAN FINANCE"}
    for answer, worth in (("NAN FINANCE", 1.0), ("FINANCE", 0.0)):
        assert (score_of("caesar_cipher", answer, entry) == 1.0) == bool(worth)


@pytest.mark.parametrize("name", GENERATORS)
def test_no_answer_is_right_for_each_question_but_of_generators_that_are_marked(name: str) -> None:
    entries = [entry_of(name, 7, index) for index in range(4)]
    for answer in ("0", "1", "nan", "[]", "True", "6+6+6+6"):
        others = {str(entry["answer"]) for entry in entries if score_of(name, answer, entry) == 1.0} - {answer}
        assert len(others) <= 1 or name in FLAWS, (answer, others)


def test_names_and_draws_that_there_are_not_are_refused() -> None:
    with pytest.raises(Refused, match="reasoning_gym has no generator 'legs': `bombus tasks reasoning_gym` lists"):
        open_tasks("reasoning_gym:legs")
    with pytest.raises(
        Refused, match="'reasoning_gym' does not name tasks of reasoning_gym: write reasoning_gym:<name>"
    ):
        open_tasks("reasoning_gym")
    with pytest.raises(Refused, match="there are no tasks 'chess'"):
        open_tasks("chess")
    with pytest.raises(Refused, match="has no option 'x': it takes none"):
        open_tasks("reasoning_gym:leg_counting", {"x": "1"})
    with pytest.raises(Refused, match="0 tasks cannot be drawn"):
        TaskDraw(size=0)
    with pytest.raises(Refused, match="the seed is 1000: it must be from 0 to 999"):
        TaskDraw(size=1, seed=1000)
