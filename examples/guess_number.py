"""An environment to serve: `bombus env serve guess_number:GuessNumber --slots 8`, in this folder."""

import random

from bombus import Task, metric, reward, stop


class GuessNumber:
    """A number from 1 to 100, to be found by guessing."""

    def reset(self, task: Task) -> str:
        self.number = random.Random(task.metadata.get("seed")).randint(1, 100)
        self.guesses: list[int] = []
        return "I have a number from 1 to 100. Find it with the tool `guess`, in few guesses."

    def guess(self, number: int) -> str:
        """Say a number, and hear whether it is too low, too high, or the one."""
        self.guesses.append(number)
        if number == self.number:
            return "that is the one"
        return "too low" if number < self.number else "too high"

    @stop
    def is_found(self) -> bool:
        return self.number in self.guesses

    @reward()
    def found(self) -> float:
        return 1 / len(self.guesses) ** 0.5 if self.is_found() else 0.0

    @metric
    def tries(self) -> float:
        return len(self.guesses)
