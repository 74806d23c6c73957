"""Environments that the tests serve: their methods say what happened in which instance."""

import asyncio
import contextlib
import itertools
import os
import time
from typing import ClassVar

from bombus.environments.kinds import (
    EnvironmentLost,
    Opening,
    RolloutScores,
    ToolCall,
    ToolOutcome,
    ToolSchema,
    Transcript,
)
from bombus.sdk.types import Task

_made = itertools.count(1)


class Counter:
    """Counts, and says which instance it is. A task with `fail` cannot be opened."""

    def __init__(self) -> None:
        self.number = next(_made)
        self.count = 0
        self.closed = 0
        self.task = Task()

    async def open(self, task: Task) -> Opening:
        if task.metadata.get("fail"):
            raise ValueError("there is no such environment")
        self.task, self.count = task, 0
        return Opening(
            messages=[{"role": "user", "content": f"count for {task.main_query}"}],
            tools=[ToolSchema(name="add", description="Adds.", parameters={"type": "object"}), ToolSchema(name="nap")],
        )

    async def call(self, call: ToolCall) -> ToolOutcome:
        match call.name:
            case "add":
                self.count += 1
                return ToolOutcome(text=f"{self.number}:{self.count}")
            case "nap":
                await asyncio.sleep(0.05)
                return ToolOutcome(text="rested")
            case "hang":
                await asyncio.Event().wait()
            case "block":
                await asyncio.to_thread(time.sleep, 0.3)
            case "break":
                raise EnvironmentLost("its backend is gone")
            case "die":
                os._exit(3)
        return ToolOutcome(text=f"{call.name} is not a tool", failed=True)

    async def is_over(self, transcript: Transcript) -> bool:
        return self.count >= 3

    async def score(self, transcript: Transcript) -> RolloutScores:
        return RolloutScores(reward=self.count / 3, rewards={"counted": self.count / 3}, is_success=self.count == 3)

    async def close(self) -> None:
        self.closed += 1


class Clinging(Counter):
    """Cannot be closed."""

    async def close(self) -> None:
        await asyncio.Event().wait()


class Stubborn(Counter):
    """Cannot be closed, and goes on when its `close` is cancelled."""

    over = asyncio.Event()

    async def close(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.over.wait()


class Unmakeable(Counter):
    def __init__(self) -> None:
        raise RuntimeError("there is no disk")


class Slow(Counter):
    """Takes a while to be made, and notes what becomes of it."""

    instances: ClassVar[list["Slow"]] = []

    def __init__(self) -> None:
        time.sleep(0.3)
        super().__init__()
        self.instances.append(self)
