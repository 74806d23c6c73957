"""The games that the demo trains on: where their tasks come from, how an episode is played, and how it is rewarded."""

import hashlib
import random
import string
from collections.abc import Awaitable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import msgspec

from bombus.errors import BombusError

Messages = list[dict[str, Any]]


class GameTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `id` names its group; `entry` is what the game needs to score an answer."""

    id: str
    prompt: str
    answer: str
    entry: dict[str, Any] = {}


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an episode: its reward, 0 to 1, and whether its answer was exactly right.

    If `call_rewards` is given, one for each model call, it is reported instead of `reward`.
    """

    reward: float
    exact: bool
    call_rewards: tuple[float, ...] | None = None
    kind: str = ""  # the kind of answer, for the summary at the end


class ModelReply(msgspec.Struct, frozen=True):
    """A reply from the model. `ended` says whether the model ended the reply, rather than the token limit."""

    text: str
    ended: bool


class CallRefused(BombusError):
    """The gateway refused a model call. The message comes from the gateway and says what to do."""


class GameModel(Protocol):
    """The model in one episode, with the two kinds of completion that OpenAI's API has.

    Both raise `CallRefused` if the gateway refuses the call.
    """

    def chat(self, messages: Messages, max_tokens: int) -> Awaitable[ModelReply]: ...

    def complete(self, prompt: str, max_tokens: int) -> Awaitable[ModelReply]: ...


class Game(Protocol):
    @property
    def title(self) -> str:
        """What the game is about, in one sentence for people."""
        ...

    def training(self, rng: random.Random) -> GameTask:
        """Draw a task to train on."""
        ...

    def held_out(self) -> Sequence[GameTask]:
        """Return the tasks for evaluation, none of which is ever trained on."""
        ...

    async def play(self, model: GameModel, task: GameTask) -> Played: ...

    def constant_reply(self) -> tuple[str, float]:
        """Return the fixed reply that does best on the held-out tasks, and its mean reward."""
        ...


class Letters:
    """A game in which the right answer to `c=` is the letter c, eight times. The model starts from scratch, so it has
    to learn the alphabet first.

    With `turns` 2, the text after the first reply names another letter, which the second reply must repeat, so the
    model has to attend to the right one of two letters.
    """

    SHARE = 8  # number of letters in a reply

    def __init__(self, turns: int = 1, letters: int = 16) -> None:
        self.turns = turns
        self.letters = string.ascii_lowercase[:letters]
        self._deck: list[str] = []
        self.title = "answer `c=` with the letter c, eight times" + (
            "; then again for the letter that the tool's answer names" if turns > 1 else ""
        )

    def _task(self, letters: Sequence[str]) -> GameTask:
        answer = "".join(letters)
        return GameTask(id=answer, prompt=f"{letters[0]}=", answer=answer)

    def training(self, rng: random.Random) -> GameTask:
        """Draw every letter once before repeating any, so that a batch of sixteen one-turn tasks covers them all."""
        if len(self._deck) < self.turns:
            self._deck = rng.sample(self.letters, len(self.letters))
        return self._task([self._deck.pop() for _ in range(self.turns)])

    def held_out(self) -> Sequence[GameTask]:
        """Return tasks for every letter. There are so few that evaluation only shows whether all were learned."""
        rng = random.Random(1)
        return [
            self._task([letter, *(rng.choice(self.letters) for _ in range(self.turns - 1))])
            for letter in self.letters
            for _ in range(self.turns)
        ]

    async def play(self, model: GameModel, task: GameTask) -> Played:
        """Play with bare text, as TRL's baseline does: a chat template adds forty tokens to be learned and ignored."""
        text = ""
        shares: list[float] = []
        for letter in task.answer:
            text += f"{letter}="
            reply = (await model.complete(text, self.SHARE)).text
            text += reply
            shares.append(reply[: self.SHARE].count(letter) / self.SHARE)
        reward = sum(shares) / self.turns
        # One reward for each call: a good first answer must not be blamed for a bad second one.
        return Played(reward=reward, exact=reward == 1.0, call_rewards=tuple(shares) if self.turns > 1 else None)

    def constant_reply(self) -> tuple[str, float]:
        tasks = self.held_out()
        means = {
            letter: sum(task.answer.count(letter) for task in tasks) / (len(tasks) * self.turns)
            for letter in self.letters
        }
        best = max(means, key=lambda letter: means[letter])
        return best * self.SHARE, means[best]


class Needle:
    """reasoning-gym's `needle_haystack`: three sentences about three people, and a question about which of them it was.

    Held-out tasks use names that no training task uses, so the model cannot just learn the answers.
    """

    title = "find the right one of three names in a short text (reasoning-gym needle_haystack)"
    SYSTEM = "Reply with the answer only."
    STATEMENTS = 3
    MAX_TOKENS = 8
    HELD_OUT = 128
    SIZE = 1_000_000  # entries in the dataset, which are generated when they are read
    TRAINING_SEED, HELD_OUT_SEED = 1, 900_000_000
    RIGHT, OTHER, NONE = "the right name", "another name of the text", "no name of the text"

    def __init__(self) -> None:
        self._takes_system = True  # whether the model's chat template supports a system message

    @staticmethod
    def _is_held_out(name: str) -> bool:
        """Return whether a name is in the fixed quarter of all names that training never uses."""
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

    def _task(self, entry: dict[str, Any], id: str) -> GameTask:
        sentences = entry["question"].split("\n")[0].split(". ")
        names = [sentence.split()[0] for sentence in sentences if sentence.strip()]
        return GameTask(id=id, prompt=entry["question"], answer=entry["answer"], entry={"names": names})

    def training(self, rng: random.Random) -> GameTask:
        while True:
            index = rng.randrange(self.SIZE)
            task = self._task(self._training[index], f"needle-{index}")
            if not any(map(self._is_held_out, task.entry["names"])):
                return task

    def _held_out(self) -> Iterator[GameTask]:
        dataset = self._dataset(self.HELD_OUT_SEED)
        for index in range(self.SIZE):
            task = self._task(dataset[index], f"held-out-{index}")
            names = task.entry["names"]
            if all(map(self._is_held_out, names)) and len(set(names)) == self.STATEMENTS:
                yield task

    @cached_property
    def _tasks(self) -> list[GameTask]:
        held_out = self._held_out()
        return [next(held_out) for _ in range(self.HELD_OUT)]

    def held_out(self) -> Sequence[GameTask]:
        return self._tasks

    @staticmethod
    def reward(reply: ModelReply, answer: str) -> float:
        """Return 0.9 times how well a reply matches the answer, plus 0.1 if the model ended the reply.

        If the text contains the answer, the match is the answer's share of the text. If not, it is 0.3 times the
        fraction of the answer that the text begins with.
        """
        text = reply.text.strip().lower()
        wanted = answer.lower()
        if wanted in text:
            share = len(wanted) / len(text)
        else:
            common = 0
            while common < min(len(text), len(wanted)) and text[common] == wanted[common]:
                common += 1
            share = 0.3 * common / len(wanted)
        return 0.9 * share + 0.1 * reply.ended

    async def play(self, model: GameModel, task: GameTask) -> Played:
        reply = await self._ask(model, task.prompt)
        answer = reply.text.strip().lower()
        exact = answer == task.answer.lower()
        named = answer in [name.lower() for name in task.entry["names"]]
        kind = self.RIGHT if exact else self.OTHER if named else self.NONE
        return Played(reward=self.reward(reply, task.answer), exact=exact, kind=kind)

    async def _ask(self, model: GameModel, question: str) -> ModelReply:
        """Ask the model. If it refuses system messages, as Gemma 2 does, put the system text before the question
        instead."""
        if self._takes_system:
            try:
                messages = [{"role": "system", "content": self.SYSTEM}, {"role": "user", "content": question}]
                return await model.chat(messages, self.MAX_TOKENS)
            except CallRefused:
                self._takes_system = False
        return await model.chat([{"role": "user", "content": f"{self.SYSTEM}\n\n{question}"}], self.MAX_TOKENS)

    def constant_reply(self) -> tuple[str, float]:
        tasks = self.held_out()
        means = {
            answer: sum(self.reward(ModelReply(answer, True), task.answer) for task in tasks) / len(tasks)
            for answer in {task.answer for task in tasks}
        }
        best = max(sorted(means), key=lambda answer: means[answer])
        return best, means[best]

    def positional_reply(self) -> tuple[str, float, float]:
        """Return the best fixed position, its mean reward and its share of exact answers.

        The reply for a position always gives the name that comes first, second or third in the text.
        """
        tasks = self.held_out()
        best = ("", 0.0, 0.0)
        for place in range(self.STATEMENTS):
            replies = [ModelReply(task.entry["names"][place], True) for task in tasks]
            rewards = [self.reward(reply, task.answer) for reply, task in zip(replies, tasks)]
            hits = [reply.text == task.answer for reply, task in zip(replies, tasks)]
            found = (f"name {place + 1} of the text", sum(rewards) / len(rewards), sum(hits) / len(hits))
            best = max(best, found, key=lambda each: each[1])
        return best

    def summary(self, before: dict[str, float], after: dict[str, float]) -> str:
        """Return a summary of what was learned: the form of answers, and how often the right name is chosen."""

        def named(kinds: dict[str, float]) -> float:
            return kinds.get(self.RIGHT, 0.0) + kinds.get(self.OTHER, 0.0)

        chosen = after.get(self.RIGHT, 0.0) / named(after) if named(after) else 0.0
        lines = [
            f"Form: {named(before):.0%} of the answers were names from the text at first, {named(after):.0%} are now.",
            f"Skill: of those, {chosen:.0%} are the right one; picking one of {self.STATEMENTS} blindly "
            f"would give {1 / self.STATEMENTS:.0%}.",
        ]
        return "\n".join(lines)
