"""What is trained on: where questions come from, how one episode is played, and what it is worth."""

import random
import string
from collections.abc import Awaitable, Sequence
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
    """What an episode was worth, 0 to 1, and whether its answer was exactly right."""

    reward: float
    exact: bool
    answer: str = ""


class Chat(Protocol):
    """The model, inside one episode."""

    def __call__(self, messages: Messages, max_tokens: int) -> Awaitable[str]: ...


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

    async def play(self, chat: Chat, question: Question) -> Played: ...

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
        self.title = "answer `c=` with the letter c, eight times" + (
            "; then again for the letter that the tool's answer names" if turns > 1 else ""
        )

    def _question(self, letters: Sequence[str]) -> Question:
        asked = "".join(letters)
        return Question(id=asked, prompt=f"{letters[0]}=", answer=asked)

    def training(self, rng: random.Random) -> Question:
        return self._question([rng.choice(self.letters) for _ in range(self.turns)])

    def held_out(self) -> Sequence[Question]:
        """There are only so many letters: what is measured is that all of them were learned."""
        rng = random.Random(1)
        return [
            self._question([letter, *(rng.choice(self.letters) for _ in range(self.turns - 1))])
            for letter in self.letters
            for _ in range(self.turns)
        ]

    async def play(self, chat: Chat, question: Question) -> Played:
        messages: Messages = []
        share = 0.0
        for turn, letter in enumerate(question.answer):
            role = "user" if turn == 0 else "tool"
            messages.append({"role": role, "content": f"{letter}="})
            reply = await chat(messages, self.SHARE)
            messages.append({"role": "assistant", "content": reply})
            share += reply[: self.SHARE].count(letter) / self.SHARE
        reward = share / self.turns
        return Played(reward=reward, exact=reward == 1.0)

    def constant_reply(self) -> tuple[str, float]:
        questions = self.held_out()
        means = {
            letter: sum(q.answer.count(letter) for q in questions) / (len(questions) * self.turns)
            for letter in self.letters
        }
        best = max(means, key=lambda letter: means[letter])
        return best * self.SHARE, means[best]
