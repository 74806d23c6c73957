"""What tests of engines that are reached over HTTP share: requests in, answers put together, processes looked at."""

import asyncio
from collections.abc import Callable

from bombus.hive.generation import Fault, FrameReader, Generate
from bombus_inference.backends.protocol import Delivery, InferenceBackend
from tests.inference.backends.small_engines import Answer

PATIENCE_S = 300.0  # vLLM on a CPU that others use too samples a few tokens a second


class Asker:
    """Takes a backend's deliveries."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self._readers: dict[int, FrameReader] = {}
        self._done: set[int] = set()
        self._changed = asyncio.Event()

    def deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            assert delivery.ticket not in self._done, "nothing comes after the end"
            for frame in self._readers[delivery.ticket].feed(delivery.body):
                self.answers[delivery.ticket].take(frame)
            if delivery.done:
                self._done.add(delivery.ticket)
        self._changed.set()

    def add(self, backend: InferenceBackend, request: Generate) -> int:
        ticket = len(self.answers) + 1
        self.answers[ticket] = Answer()
        self._readers[ticket] = FrameReader()
        backend.add(ticket, request)
        return ticket

    async def until(self, holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def finished(self, ticket: int) -> Answer:
        await self.until(lambda: ticket in self._done)
        return self.answers[ticket]

    async def ask(self, backend: InferenceBackend, request: Generate) -> Answer:
        return await self.finished(self.add(backend, request))

    async def refused(self, backend: InferenceBackend, request: Generate) -> Fault:
        fault = (await self.ask(backend, request)).fault
        assert fault is not None
        return fault

    def sampled(self, ticket: int) -> int:
        """How many tokens have come so far."""
        return sum(len(choice.tokens) for choice in self.answers[ticket].choices.values())


async def silent(stage: str) -> None:
    """Nobody listens to how far a start has come."""


async def until_metric(
    backend: InferenceBackend, name: str, holds: Callable[[float], bool], timeout_s: float = PATIENCE_S
) -> None:
    """Ask for the metrics until one is as wanted: asking takes its own time."""
    async with asyncio.timeout(timeout_s):
        while not holds((await backend.metrics()).get(name, -1.0)):
            await asyncio.sleep(0)
