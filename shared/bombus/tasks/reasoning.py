"""The task generators of reasoning-gym, each with its own verifier: `reasoning_gym:<name>`."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import MethodFailed, Transcript
from bombus.environments.plain.marks import metric, reward, success
from bombus.errors import Code, Refused, in_one_line
from bombus.sdk.types import Task
from bombus.tasks import verifying
from bombus.tasks.entries import entry_of
from bombus.tasks.kinds import NoOptions, TaskDraw, TaskFamily, TaskName, TasksNotInstalled, options_of

INSTRUCTION = (
    "Solve the task. You may think first. Then write your final answer, and nothing else, between <answer> and "
    "</answer>."
)
ABOUT = "puzzles, arithmetic, logic and algorithms from reasoning-gym, each with a verifier"

# The gold answers of these generators score 0 or 0.01 in reasoning-gym 0.1.25.
GOLD_SCORES_NOTHING = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})
FLAWS = {
    **dict.fromkeys(GOLD_SCORES_NOTHING, "its own gold answers score 0"),
    "game_of_life_halting": "its verifier treats any answer as True",
    "coin_flip": "its verifier accepts 0 for any probability that begins with 0",
    "puzzle24": "its verifier accepts any four numbers that make 24",
}
NOT_A_GENERATOR = frozenset({"composite"})  # it combines other generators

_CLOSED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_OPEN = re.compile(r"<answer>((?:(?!<answer>).)*)\Z", re.DOTALL)
_NOT_A_NUMBER = re.compile(r"(?<![^\W\d_])nan[ij]?(?![^\W\d_])", re.IGNORECASE)


class ReasoningTasks:
    """The tasks of one generator."""

    budgets = RolloutBudgets(turns_max=1, tokens_max=4096)

    def __init__(self, generator: str) -> None:
        self.generator = generator
        self.name = f"reasoning_gym:{generator}"

    def draw(self, draw: TaskDraw) -> list[Task]:
        return [self._task(draw.first_seed, index, draw) for index in range(draw.size)]

    def _task(self, seed: int, index: int, draw: TaskDraw) -> Task:
        return Task(
            main_query=entry_of(self.generator, seed, index)["question"],
            task_id=f"{self.name}/{draw.split}/{draw.seed}/{index}",
            env_type=self.name,
            metadata={"generator": self.generator, "generator_seed": seed, "index": index},
        )

    def environment(self) -> object:
        return ReasoningPuzzle()

    def figures(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


class ReasoningPuzzle:
    """One question. The reward is the score from the generator's own verifier, from 0 to 1."""

    def __init__(self) -> None:
        self._generator = ""
        self._entry: dict[str, Any] = {}
        self._scores: dict[str, float] = {}

    def reset(self, task: Task) -> list[dict[str, str]]:
        verifying.judge.start()
        known = task.metadata
        self._generator = known["generator"]
        self._entry = entry_of(self._generator, known["generator_seed"], known["index"])
        self._scores = {}
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self._entry["question"]}]

    def gold(self, task: Task) -> list[str]:
        """Return the correct reply."""
        known = task.metadata
        entry = entry_of(known["generator"], known["generator_seed"], known["index"])
        return [f"<answer>{entry['answer']}</answer>"]

    @reward
    def score(self, transcript: Transcript) -> float:
        """Return the verifier's score for the answer, or 0 if the verifier cannot read the answer."""
        answer = answer_in(_last_text(transcript))
        if answer not in self._scores:
            self._scores = {answer: score_of(self._generator, answer, self._entry)}
        return self._scores[answer]

    @metric
    def has_answer(self, transcript: Transcript) -> float:
        """Return whether the reply contains an answer in tags."""
        return float(_tagged_answer(_last_text(transcript)) is not None)

    @success
    def is_solved(self, transcript: Transcript) -> bool:
        """Return whether the answer got the full score."""
        return self.score(transcript) >= 1.0


def answer_in(text: str) -> str:
    """Return the last answer that is enclosed in tags, or the whole text if there is no such answer."""
    found = _tagged_answer(text)
    return (text if found is None else found).strip()


def score_of(generator: str, answer: str, entry: dict[str, Any]) -> float:
    """Return the verifier's score, from 0 to 1.

    The score is 0 for an answer that the verifier cannot read or does not finish judging, provided that the verifier
    can judge the correct answer. If it cannot, the verifier is to blame, and this raises `MethodFailed`.

    An answer that contains the whole question is wrong, because some verifiers would find the solution in the question.
    An answer that contains "nan" is wrong too, unless the correct answer contains it: some verifiers accept "nan" as
    any number.
    """
    if entry["question"].strip() in answer or (_has_nan(answer) and not _has_nan(str(entry["answer"]))):
        return 0.0
    score = verifying.judge.score(generator, answer, entry)
    if score is None and verifying.judge.score(generator, str(entry["answer"]), entry) is None:
        raise MethodFailed(f"the verifier of {generator} cannot judge the correct answer either")
    return 0.0 if score is None else min(1.0, max(0.0, score))


def _tagged_answer(text: str) -> str | None:
    """Return the last answer that is enclosed in tags.

    An unclosed tag counts only if there is no closed one: otherwise the reply merely mentions the tag.
    """
    if closed := _CLOSED.findall(text):
        return str(closed[-1])
    found = _OPEN.search(text)
    return None if found is None else found[1]


def _has_nan(answer: str) -> bool:
    """Return whether an answer contains NaN, even with spaces between the letters, since some verifiers remove
    spaces."""
    return any(_NOT_A_NUMBER.search(each) for each in (answer, "".join(answer.split())))


def _last_text(transcript: Transcript) -> str:
    replies = [message.get("content") for message in transcript.messages if message.get("role") == "assistant"]
    return replies[-1] if replies and isinstance(replies[-1], str) else ""


def _names() -> Sequence[TaskName]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # raised by a dependency when it is first compiled
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TasksNotInstalled(
            f"reasoning-gym cannot be imported ({in_one_line(error)}): pip install 'bombus[reasoning]'"
        ) from error
    return [TaskName(name=name, flaw=FLAWS.get(name, "")) for name in sorted(DATASETS) if name not in NOT_A_GENERATOR]


def _open(name: str, given: Mapping[str, str]) -> ReasoningTasks:
    options_of(NoOptions, f"reasoning_gym:{name}", given)
    if name not in {each.name for each in _names()}:
        raise Refused(
            Code.BAD_CONFIG, f"reasoning_gym has no generator {name!r}: `bombus tasks reasoning_gym` lists them"
        )
    return ReasoningTasks(name)


FAMILY = TaskFamily(
    name="reasoning_gym", about=ABOUT, open=_open, names=_names, package="reasoning_gym", extra="reasoning"
)
