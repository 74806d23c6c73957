"""Plain classes that several tests play."""

import asyncio
import threading
from typing import Annotated, Any

from pydantic import BaseModel, Field

from bombus import Task
from bombus.environments.kinds import MessageDict, Transcript
from bombus.environments.plain.marks import metric, reward, stop, success


class Point(BaseModel):
    x: int
    y: int = 0


class Counter:
    """Counts up to the number that the task asks for."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0}
        self.closed = 0

    def reset(self, task: Task) -> str:
        self.state = {"count": 0}
        return f"Count to {task.metadata['goal']}."

    def add(self, amount: int, times: int = 1) -> dict[str, int]:
        """Add to the count.

        Args:
            amount: how much to add
            times (int): how often,
                as a whole number
        """
        self.state["count"] += amount * times
        return self.state

    async def where(self, point: Annotated[Point, Field(description="in the plane")]) -> str:
        """Say where a point is."""
        return f"{point.x}/{point.y}"

    def fail(self) -> None:
        """Fail."""
        raise ValueError("as it was asked to")

    @reward(weight=2.0)
    def reached(self, task: Task, state: dict[str, int]) -> float:
        return float(state["count"] == task.metadata["goal"])

    @reward(weight=-0.5)
    async def wrote(self, transcript: Transcript) -> bool:
        return transcript.turns > 0

    @metric
    def count(self) -> int:
        return int(self.state["count"])

    @success
    def done(self, task: Task) -> bool:
        return bool(self.state["count"] == task.metadata["goal"])

    @stop
    def is_over_the_top(self, state: dict[str, int], task: Task) -> bool:
        return state["count"] > int(task.metadata["goal"])

    def _helper(self) -> None: ...

    def close(self) -> None:
        self.closed += 1

    def gold(self, task: Task) -> list[object]:
        return [("add", {"amount": task.metadata["goal"]}), "That is it."]


class Threads:
    """Tells in which thread its methods run, and has tools that never end by themselves."""

    def __init__(self) -> None:
        self.hangs, self.release = threading.Event(), threading.Event()

    def reset(self, task: Task) -> list[MessageDict]:
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]

    def touch(self) -> str:
        """Say which thread this is."""
        return str(threading.get_ident())

    def hang(self) -> str:
        """Never come back, unless a test lets it."""
        self.hangs.set()
        self.release.wait()
        return "late"

    async def wait(self) -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return "never"

    @reward
    def one(self) -> float:
        return 1.0


class Together(Threads):
    """The same, whose tools may overlap."""

    tools_run_together = True

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=30)

    def meet(self) -> str:
        """Wait for another call of this."""
        self.barrier.wait()
        return "met"
