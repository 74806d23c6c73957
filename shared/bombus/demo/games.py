"""What is trained on: where questions come from, how one episode is played, and what it is worth."""

import hashlib
import random
import string
from collections.abc import Awaitable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

Messages = list[dict[str, Any]]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `id` names its group, `entry` is what the game needs to score an answer."""

    id: str
    prompt: str
    answer: str
    entry: dict[str, Any] = {}


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode was worth, 0 to 1, and whether its answer was exactly right.

    `call_rewards`, when given, is reported instead of `reward`: one for each model call.
    """

    reward: float
    exact: bool
    call_rewards: tuple[float, ...] | None = None
    kind: str = ""  # which kind of answer it was, for the words at the end


class Reply(msgspec.Struct, frozen=True):
    """What the model said; `ended` when it stopped by itself."""

    text: str
    ended: bool


class Model(Protocol):
    """The model, inside one episode: OpenAI's two ways to ask."""

    def chat(self, messages: Messages, max_tokens: int) -> Awaitable[Reply]: ...

    def complete(self, prompt: str, max_tokens: int) -> Awaitable[Reply]: ...


class Game(Protocol):
    @property
    def title(self) -> str:
        """What the task is, in one sentence for a person."""
        ...

    def training(self, rng: random.Random) -> Question:
        """Draw a question to train on."""
        ...

    def held_out(self) -> Sequence[Question]:
        """The questions that measure; none of them is ever trained on."""
        ...

    async def play(self, model: Model, question: Question) -> Played: ...

    def constant_reply(self) -> tuple[str, float]:
        """The one reply that does best on the held-out questions whatever they ask, and its mean reward."""
        ...


class Letters:
    """`c=` wants eight times c. From scratch, so the model has to learn the alphabet first.

    With `turns` 2 the answer to the first reply names another letter, which is wanted next: the model has to look at
    the right one of two.
    """

    SHARE = 8  # letters in a reply

    def __init__(self, turns: int = 1, letters: int = 16) -> None:
        self.turns = turns
        self.letters = string.ascii_lowercase[:letters]
        self._deck: list[str] = []
        self.title = "answer `c=` with the letter c, eight times" + (
            "; then again for the letter that the tool's answer names" if turns > 1 else ""
        )

    def _question(self, letters: Sequence[str]) -> Question:
        asked = "".join(letters)
        return Question(id=asked, prompt=f"{letters[0]}=", answer=asked)

    def training(self, rng: random.Random) -> Question:
        """Every letter comes once before one comes again, so a batch that asks for sixteen asks for each of them."""
        if len(self._deck) < self.turns:
            self._deck = rng.sample(self.letters, len(self.letters))
        return self._question([self._deck.pop() for _ in range(self.turns)])

    def held_out(self) -> Sequence[Question]:
        """There are only so many letters: what is measured is that all of them were learned."""
        rng = random.Random(1)
        return [
            self._question([letter, *(rng.choice(self.letters) for _ in range(self.turns - 1))])
            for letter in self.letters
            for _ in range(self.turns)
        ]

    async def play(self, model: Model, question: Question) -> Played:
        """Bare text, as TRL's baseline has it: a chat template is forty more tokens to learn to look past."""
        text = ""
        shares: list[float] = []
        for letter in question.answer:
            text += f"{letter}="
            reply = (await model.complete(text, self.SHARE)).text
            text += reply
            shares.append(reply[: self.SHARE].count(letter) / self.SHARE)
        reward = sum(shares) / self.turns
        # One reward for each call: a good first answer is not blamed for a bad second one.
        return Played(reward=reward, exact=reward == 1.0, call_rewards=tuple(shares) if self.turns > 1 else None)

    def constant_reply(self) -> tuple[str, float]:
        questions = self.held_out()
        means = {
            letter: sum(q.answer.count(letter) for q in questions) / (len(questions) * self.turns)
            for letter in self.letters
        }
        best = max(means, key=lambda letter: means[letter])
        return best * self.SHARE, means[best]


class Needle:
    """reasoning-gym's `needle_haystack`: three sentences, and a question which of three people it is about.

    Held-out questions use names that no training question uses: what is learned cannot be the answers.
    """

    title = "find the right one of three names in a short text (reasoning-gym needle_haystack)"
    SYSTEM = "Reply with the answer only."
    STATEMENTS = 3
    MAX_TOKENS = 8
    HELD_OUT = 128
    SIZE = 1_000_000  # of the generator's stream: entries are made when they are asked for
    TRAINING_SEED, HELD_OUT_SEED = 1, 900_000_000
    RIGHT, OTHER, NONE = "the right name", "another name of the text", "no name of the text"

    @staticmethod
    def _is_held_out(name: str) -> bool:
        """A fixed quarter of all names."""
        return hashlib.sha256(name.lower().encode()).digest()[0] % 4 == 0

    def _dataset(self, seed: int) -> Any:
        from reasoning_gym import create_dataset

        number = self.STATEMENTS
        return create_dataset(
            "needle_haystack", size=self.SIZE, seed=seed, min_num_statements=number, max_num_statements=number
        )

    @cached_property
    def _training(self) -> Any:
        return self._dataset(self.TRAINING_SEED)

    def _question(self, entry: dict[str, Any], id: str) -> Question:
        sentences = entry["question"].split("\n")[0].split(". ")
        names = [sentence.split()[0] for sentence in sentences if sentence.strip()]
        return Question(id=id, prompt=entry["question"], answer=entry["answer"], entry={"names": names})

    def training(self, rng: random.Random) -> Question:
        while True:
            index = rng.randrange(self.SIZE)
            question = self._question(self._training[index], f"needle-{index}")
            if not any(map(self._is_held_out, question.entry["names"])):
                return question

    def _held_out(self) -> Iterator[Question]:
        dataset = self._dataset(self.HELD_OUT_SEED)
        for index in range(self.SIZE):
            question = self._question(dataset[index], f"held-out-{index}")
            names = question.entry["names"]
            if all(map(self._is_held_out, names)) and len(set(names)) == self.STATEMENTS:
                yield question

    @cached_property
    def _questions(self) -> list[Question]:
        held_out = self._held_out()
        return [next(held_out) for _ in range(self.HELD_OUT)]

    def held_out(self) -> Sequence[Question]:
        return self._questions

    @staticmethod
    def reward(reply: Reply, answer: str) -> float:
        """0.9 for the name alone, less the more there is around it, a little for its beginning; 0.1 for stopping."""
        said = reply.text.strip().lower()
        wanted = answer.lower()
        if wanted in said:
            share = len(wanted) / len(said)
        else:
            common = 0
            while common < min(len(said), len(wanted)) and said[common] == wanted[common]:
                common += 1
            share = 0.3 * common / len(wanted)
        return 0.9 * share + 0.1 * reply.ended

    async def play(self, model: Model, question: Question) -> Played:
        messages: Messages = [
            {"role": "system", "content": self.SYSTEM},
            {"role": "user", "content": question.prompt},
        ]
        reply = await model.chat(messages, self.MAX_TOKENS)
        said = reply.text.strip().lower()
        exact = said == question.answer.lower()
        named = said in [name.lower() for name in question.entry["names"]]
        kind = self.RIGHT if exact else self.OTHER if named else self.NONE
        return Played(reward=self.reward(reply, question.answer), exact=exact, kind=kind)

    def constant_reply(self) -> tuple[str, float]:
        questions = self.held_out()
        means = {
            said: sum(self.reward(Reply(said, True), question.answer) for question in questions) / len(questions)
            for said in {question.answer for question in questions}
        }
        best = max(sorted(means), key=lambda said: means[said])
        return best, means[best]

    def positional_reply(self) -> tuple[str, float, float]:
        """The best of always naming the first, second or third person: who, its mean reward, its share of hits."""
        questions = self.held_out()
        best = ("", 0.0, 0.0)
        for place in range(self.STATEMENTS):
            replies = [Reply(question.entry["names"][place], True) for question in questions]
            rewards = [self.reward(reply, question.answer) for reply, question in zip(replies, questions)]
            hits = [reply.text == question.answer for reply, question in zip(replies, questions)]
            found = (f"name {place + 1} of the text", sum(rewards) / len(rewards), sum(hits) / len(hits))
            best = max(best, found, key=lambda each: each[1])
        return best

    def in_words(self, before: dict[str, float], after: dict[str, float]) -> str:
        """What was learned: the form of an answer, and how often the choice among the names is right."""

        def named(kinds: dict[str, float]) -> float:
            return kinds.get(self.RIGHT, 0.0) + kinds.get(self.OTHER, 0.0)

        chosen = after.get(self.RIGHT, 0.0) / named(after) if named(after) else 0.0
        lines = [
            f"Form: {named(before):.0%} of the answers were a name of the text before, {named(after):.0%} are now.",
            f"Skill: of those, {chosen:.0%} are the right one; picking one of {self.STATEMENTS} blindly "
            f"would give {1 / self.STATEMENTS:.0%}.",
        ]
        return "\n".join(lines)
