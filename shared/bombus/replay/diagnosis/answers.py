"""Statistics of a step's answers that need the tokens of its calls: repetitions among answers, and copies of the
prompt."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress

import msgspec

from bombus.replay.diagnosis.statistics import mean

TOKENS_MAX = 2048  # the most tokens of an answer, and of the end of its prompt, that are examined
PHRASE_TOKENS = 8  # length of a phrase: longer than an answer's markup, such as `<answer>`
PHRASES_KEPT = 64
FREQUENT = 0.3  # fraction of a step's answers in which a phrase must appear to be recorded
ANSWER_TOKENS_MIN = 8  # shorter answers may match others or the prompt by chance, or because of the task


class SampledAnswer(msgspec.Struct, frozen=True):
    """The last answer of an episode. `prompt` is what the answer's call added to the conversation, which is the whole
    prompt if the call `opens` it."""

    task: str
    reward: float
    prompt: Sequence[int]
    tokens: Sequence[int]
    opens: bool = False


class AnswerFigures(msgspec.Struct, kw_only=True, frozen=True):
    """Counts over the answers of one step that were read.

    `rewards` has the rewards of all these answers, and `duplicates` the rewards of those that have an equal answer in
    their group. `constant` counts the tasks that share the most common answer, and `same_prompt` those that share the
    most common prompt; only prompts without earlier answers count. Of the `best` answers, `leaked` appear
    word for word in their prompt. `phrases` maps the hash of each frequent token sequence to the fractions of all
    answers, of the better and of the worse answers in their groups, that contain the sequence.
    """

    rewards: list[float] = []
    duplicates: list[float] = []
    tasks: int = 0
    constant: int = 0
    same_prompt: int = 0
    best: int = 0
    leaked: int = 0
    phrases: dict[int, tuple[float, float, float]] = {}

    @property
    def count(self) -> int:
        return len(self.rewards)


def figures_of(answers: Iterable[SampledAnswer]) -> AnswerFigures:
    """Return the statistics of a step's answers, grouped by task."""
    groups: defaultdict[str, list[SampledAnswer]] = defaultdict(list)
    for answer in answers:
        groups[answer.task].append(answer)
    duplicates: list[float] = []
    tasks_with: Counter[tuple[int, ...]] = Counter()
    tasks_asked: Counter[tuple[int, ...]] = Counter()
    for group in groups.values():
        texts = [tuple(answer.tokens[:TOKENS_MAX]) for answer in group]
        counts = Counter(texts)
        repeated = [counts[text] > 1 and len(text) >= ANSWER_TOKENS_MIN for text in texts]
        duplicates += [answer.reward for answer in compress(group, repeated)]
        tasks_asked.update({tuple(answer.prompt) for answer in group if answer.opens})
        tasks_with.update(text for text, count in counts.items() if 2 * count >= len(group))
    best = [answer for group in groups.values() for answer in _best(group) if len(answer.tokens) >= ANSWER_TOKENS_MIN]
    return AnswerFigures(
        rewards=[answer.reward for group in groups.values() for answer in group],
        duplicates=duplicates,
        tasks=len(groups),
        constant=max(tasks_with.values(), default=0),
        same_prompt=max(tasks_asked.values(), default=0),
        best=len(best),
        leaked=sum(_stands_in(answer.tokens, answer.prompt) for answer in best),
        phrases=_phrases(groups.values()),
    )


def _best(group: Sequence[SampledAnswer]) -> list[SampledAnswer]:
    """Return the answers with a group's highest reward, or none if all have the same reward and it is not positive."""
    highest = max(answer.reward for answer in group)
    best = [answer for answer in group if answer.reward == highest]
    return best if len(best) < len(group) or highest > 0 else []


def _stands_in(tokens: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return whether an answer appears in its prompt. Its last token, which may be the end of a turn, is ignored."""
    wanted, text = array("i", tokens[:-1][:TOKENS_MAX]).tobytes(), array("i", prompt[-TOKENS_MAX:]).tobytes()
    found = text.find(wanted)
    while found > 0 and found % array("i").itemsize:  # this match does not begin at a token boundary
        found = text.find(wanted, found + 1)
    return found >= 0


def _phrases(groups: Iterable[Sequence[SampledAnswer]]) -> dict[int, tuple[float, float, float]]:
    """Return the most frequent phrases among those found in answers to several tasks."""
    better: Counter[int] = Counter()
    worse: Counter[int] = Counter()
    tasks: Counter[int] = Counter()
    answers: Counter[bool] = Counter()
    for group in groups:
        level = mean([answer.reward for answer in group])
        of_task: set[int] = set()
        for answer in group:
            tokens, is_better = tuple(answer.tokens[:TOKENS_MAX]), answer.reward > level
            found = {hash(tokens[at : at + PHRASE_TOKENS]) for at in range(len(tokens) - PHRASE_TOKENS + 1)}
            answers[is_better] += 1
            (better if is_better else worse).update(found)
            of_task |= found
        tasks.update(of_task)
    counts = [each for each in (better + worse).most_common() if tasks[each[0]] > 1][:PHRASES_KEPT]
    return {
        phrase: (
            count / answers.total(),
            better[phrase] / max(1, answers[True]),
            worse[phrase] / max(1, answers[False]),
        )
        for phrase, count in counts
        if count >= FREQUENT * answers.total()
    }
