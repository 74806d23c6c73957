"""One question: the model searches, reads the results, and answers."""

from collections.abc import Mapping
from typing import Any

from bombus.environments.plain.marks import metric, reward, success
from bombus.environments.plain.play import PlayAgents
from bombus.sdk.types import Task
from bombus.tasks.search.answers import HINT, ActionKind, SearchAction, action_of, information, is_match, worth
from bombus.tasks.search.engine import SearchEngine

PROMPT = """\
Answer the question below. You can look things up: write <search>what to search for</search>, and what is found is \
shown to you between <information> and </information>. You have {turns} replies in all. When you know the answer, \
write <answer>the answer</answer>, with nothing but the answer between the tags.

Question: {question}"""
ROLE = "searcher"


class SearchPlay:
    """Plays a question with at most `turns_max` replies."""

    def __init__(self, engine: SearchEngine, turns_max: int, format_score: float) -> None:
        self._engine = engine
        self._turns_max = turns_max
        self._format_score = format_score
        self._actions: list[SearchAction] = []

    async def play(self, task: Task, agents: PlayAgents) -> None:
        self._actions = []
        question = PROMPT.format(turns=self._turns_max, question=task.main_query)
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        while len(self._actions) < self._turns_max:
            answer = await agents[ROLE].ask(messages)
            action = action_of(answer.text)
            self._actions.append(action)
            if action.kind == ActionKind.ANSWER:
                return
            if len(self._actions) < self._turns_max:  # nothing is shown after the last reply
                messages += [answer.message, {"role": "user", "content": await self._shown(action)}]

    async def _shown(self, action: SearchAction) -> str:
        if action.kind == ActionKind.INVALID:
            return HINT
        return information(await self._engine.search(action.text))

    @reward
    def answer_score(self, task: Task) -> float:
        """Return the reward of the replies."""
        return worth(self._actions, _golds(task.metadata), self._format_score)

    @success
    def is_right(self, task: Task) -> bool:
        """Return whether the answer is correct, even if earlier replies were invalid."""
        last = self._actions[-1] if self._actions else SearchAction(ActionKind.INVALID)
        return last.kind == ActionKind.ANSWER and is_match(last.text, _golds(task.metadata))

    @metric
    def searches(self) -> float:
        """Return how many replies were searches."""
        return float(sum(action.kind == ActionKind.SEARCH for action in self._actions))

    @metric
    def invalid_actions(self) -> float:
        """Return how many replies were neither a search nor an answer."""
        return float(sum(action.kind == ActionKind.INVALID for action in self._actions))

    @metric
    def cache_hit_rate(self) -> float:
        """Return the fraction of all searches so far, over all episodes, that were answered from the cache."""
        return self._engine.cache.hit_rate


def _golds(metadata: Mapping[str, Any]) -> list[str]:
    return list(metadata["answers"])
