"""A client for tests of backends: it adds requests, and assembles answers from deliveries."""

import asyncio
from collections.abc import Callable

from bombus.hive.generation import Fault, FrameReader, Generate
from bombus_inference.backends.protocol import Delivery, InferenceBackend
from tests.inference.backends.small_engines import Answer

PATIENCE_S = 300.0  # on a busy CPU, vLLM samples a few tokens a second


class BackendClient:
    """Takes the deliveries of a backend."""

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
        """Return how many tokens have arrived so far."""
        return sum(len(choice.tokens) for choice in self.answers[ticket].choices.values())


async def ignore_stage(stage: str) -> None:
    """A `ReportStage` that does nothing."""


async def until_metric(
    backend: InferenceBackend, name: str, holds: Callable[[float], bool], timeout_s: float = PATIENCE_S
) -> None:
    """Read the metrics until `holds` is true of one; reading them takes time, so there is no pause."""
    async with asyncio.timeout(timeout_s):
        while not holds((await backend.metrics()).get(name, -1.0)):
            await asyncio.sleep(0)
