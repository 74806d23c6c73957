"""The family `search`: its options, its tasks, and the search engine that the tasks share."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bombus.environments.budgets import RolloutBudgets
from bombus.errors import Code, Refused
from bombus.sdk.types import Task
from bombus.tasks.kinds import TaskDraw, TaskFamily, TaskSplit, options_of
from bombus.tasks.search.backends import GoogleBackend, LocalBackend, SearchBackend
from bombus.tasks.search.corpus import (
    SearchQuestion,
    bundled_documents,
    bundled_questions,
    read_documents,
    read_questions,
)
from bombus.tasks.search.engine import SearchEngine
from bombus.tasks.search.index import LocalIndex
from bombus.tasks.search.playing import SearchPlay

EVAL_SHARE = 4  # one in four questions is for evaluation


class SearchOptions(BaseModel):
    """The options of `--set`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=2, ge=1, le=64, description="how many replies the model may give in an episode")
    topk: int = Field(default=3, ge=1, le=100, description="how many documents a search returns")
    search_concurrency: int = Field(default=256, ge=1, le=4096, description="how many queries are answered at once")
    search_backend: Literal["local", "google"] = Field(default="local", description="what answers queries")
    format_score: float = Field(
        default=0.2, ge=0.0, le=1.0, description="the reward of a wrong answer in the right format"
    )
    documents: Path | None = Field(
        default=None, description="a file of documents to index, in place of the bundled ones"
    )
    questions: Path | None = Field(default=None, description="a file of questions, in place of the bundled ones")

    @model_validator(mode="after")
    def _indexes_what_it_is_given(self) -> "SearchOptions":
        if self.documents is not None and self.search_backend == "google":
            raise ValueError("documents needs search_backend=local, not google: change it, or leave documents out")
        return self


class SearchTasks:
    """Questions, and the search engine that all episodes share."""

    name = "search"

    def __init__(self, options: SearchOptions, backend: SearchBackend | None = None) -> None:
        self._options = options
        self._questions = read_questions(options.questions) if options.questions else bundled_questions()
        self.engine = SearchEngine(backend or _backend(options), options.topk, options.search_concurrency)
        self.budgets = RolloutBudgets(turns_max=options.max_turns, tokens_max=4096)

    def draw(self, draw: TaskDraw) -> list[Task]:
        """Return as many questions as requested, or all of the split's questions if there are fewer. One in four
        questions is for evaluation, and never used for training."""
        is_eval = draw.split == TaskSplit.EVAL
        numbers = [at for at in range(len(self._questions)) if (at % EVAL_SHARE == EVAL_SHARE - 1) == is_eval]
        if not numbers:
            raise Refused(
                Code.BAD_CONFIG, f"there are {len(self._questions)} questions, but none of them is for {draw.split}"
            )
        chosen = random.Random(draw.seed).sample(numbers, min(draw.size, len(numbers)))
        return [self._task(number, self._questions[number]) for number in chosen]

    def _task(self, number: int, question: SearchQuestion) -> Task:
        return Task(
            main_query=question.question,
            task_id=f"search/{number}",
            env_type=self.name,
            metadata={"answers": list(question.answers)},
        )

    def environment(self) -> object:
        return SearchPlay(self.engine, self._options.max_turns, self._options.format_score)

    def figures(self) -> Mapping[str, float]:
        return self.engine.figures()

    def close(self) -> None:
        pass


def _backend(options: SearchOptions) -> SearchBackend:
    if options.search_backend == "google":
        return GoogleBackend()
    documents = read_documents(options.documents) if options.documents else bundled_documents()
    return LocalBackend(LocalIndex(documents))


def _open(_: str, given: Mapping[str, str]) -> SearchTasks:
    return SearchTasks(options_of(SearchOptions, "search", given))


FAMILY = TaskFamily(
    name="search",
    about="questions that are answered by searching a small index of documents, one of your own, or Google",
    open=_open,
    has_names=False,
    options=frozenset(SearchOptions.model_fields),
)
