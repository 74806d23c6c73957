"""Figures of a step's answers, which need the tokens of its calls: what repeats in them, and what they repeat."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from bombus.hive.diagnosis.statistics import mean

TOKENS_MAX = 2048  # of an answer, and as many of the end of its prompt, that are looked at
PHRASE_TOKENS = 8  # in a row: longer than the marks of an answer's form, such as `<answer>`
PHRASES_KEPT = 64
FREQUENT = 0.3  # of a step's answers: phrases in so many of them are remembered
ANSWER_TOKENS_MIN = 8  # shorter answers are equal, or stand in the prompt, by chance or by the nature of the task


class SampledAnswer(msgspec.Struct, frozen=True):
    """The last answer of an episode. `prompt` is what its call added to the conversation."""

    task: str
    reward: float
    prompt: Sequence[int]
    tokens: Sequence[int]


class AnswerFigures(msgspec.Struct, kw_only=True):
    """Figures of the answers that were read of one step. Shares are of answers.

    `duplicates` have an equal answer in their group; `constant` is the share of the answer that most tasks got.
    `leaked` is the share of the best answers that stand word for word in their prompt. `phrases` are frequent sequences
    of tokens (hashes), with their shares among the answers with more and with less than their group's mean reward.
    """

    count: int = 0
    tasks: int = 0
    duplicates: float = 0.0
    constant: float = 0.0
    constant_text: int = 0  # its hash
    best: int = 0
    leaked: float = 0.0
    phrases: dict[int, tuple[float, float, float]] = {}  # shares among all, the better and the worse answers


def figures_of(answers: Iterable[SampledAnswer]) -> AnswerFigures:
    """Return the figures of a step's answers. Groups are told apart by their task."""
    groups: defaultdict[str, list[SampledAnswer]] = defaultdict(list)
    for answer in answers:
        groups[answer.task].append(answer)
    every = [answer for group in groups.values() for answer in group]
    if not every:
        return AnswerFigures()
    texts = {id(answer): tuple(answer.tokens[:TOKENS_MAX]) for answer in every}
    duplicates = 0
    tasks_with: Counter[tuple[int, ...]] = Counter()
    for group in groups.values():
        counts = Counter(texts[id(answer)] for answer in group)
        duplicates += sum(count for text, count in counts.items() if count > 1 and len(text) >= ANSWER_TOKENS_MIN)
        tasks_with.update({text: 1 for text, count in counts.items() if 2 * count >= len(group)})
    constant, with_constant = max(tasks_with.items(), key=lambda item: item[1], default=((), 0))
    best = [answer for group in groups.values() for answer in _best(group) if len(answer.tokens) >= ANSWER_TOKENS_MIN]
    return AnswerFigures(
        count=len(every),
        tasks=len(groups),
        duplicates=duplicates / len(every),
        constant=with_constant / len(groups),
        constant_text=hash(constant),
        best=len(best),
        leaked=mean([float(_stands_in(answer.tokens, answer.prompt)) for answer in best]),
        phrases=_phrases(groups.values()),
    )


def _best(group: Sequence[SampledAnswer]) -> list[SampledAnswer]:
    """Return a group's answers with the highest reward, none if all have it."""
    highest = max(answer.reward for answer in group)
    best = [answer for answer in group if answer.reward == highest]
    return best if len(best) < len(group) or highest > 0 else []


def _stands_in(tokens: Sequence[int], prompt: Sequence[int]) -> bool:
    """Return whether an answer stands in its prompt. Its last token may be the one that ends a turn."""
    wanted, text = list(tokens[:-1][:TOKENS_MAX]), list(prompt[-TOKENS_MAX:])
    return any(
        text[start] == wanted[0] and text[start : start + len(wanted)] == wanted
        for start in range(len(text) - len(wanted) + 1)
    )


def _phrases(groups: Iterable[Sequence[SampledAnswer]]) -> dict[int, tuple[float, float, float]]:
    """Return the most frequent phrases that answers of several tasks have."""
    counts: Counter[int] = Counter()
    better: Counter[int] = Counter()
    worse: Counter[int] = Counter()
    tasks: Counter[int] = Counter()
    numbers = [0, 0, 0]
    for group in groups:
        level = mean([answer.reward for answer in group])
        of_task: set[int] = set()
        for answer in group:
            tokens = tuple(answer.tokens[:TOKENS_MAX])
            found = {hash(tokens[at : at + PHRASE_TOKENS]) for at in range(len(tokens) - PHRASE_TOKENS + 1)}
            side = better if answer.reward > level else worse
            numbers[0] += 1
            numbers[1 if side is better else 2] += 1
            counts.update(found)
            side.update(found)
            of_task |= found
        tasks.update(of_task)
    every, good, bad = numbers
    frequent = [each for each, count in counts.most_common() if count >= FREQUENT * every and tasks[each] > 1]
    return {
        each: (counts[each] / every, better[each] / max(1, good), worse[each] / max(1, bad))
        for each in frequent[:PHRASES_KEPT]
    }
