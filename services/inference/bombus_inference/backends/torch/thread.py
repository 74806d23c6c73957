"""The engine's thread: calls arrive through a queue, and all deliveries of a step are sent together.

Only this thread uses the engine. Other code uses `call` to have a function run in this thread, between two steps.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from bombus.errors import Code, EngineFault, Refused
from bombus.hive.events import CanaryCheck
from bombus.hive.generation import Fault, Generate, encode_frame
from bombus.weights.canary import CanaryFailed, Expected
from bombus_inference.backends.protocol import (
    NOTHING_LOADED,
    STOPPING,
    AdapterUse,
    Deliver,
    Delivery,
    failure,
    refusal_fault,
)
from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.engine import Engine, Output, Stats

log = logging.getLogger(__name__)

T = TypeVar("T")


def _delivery(output: Output) -> Delivery:
    body = b"".join(map(encode_frame, output.frames))
    last = output.frames[-1]
    return Delivery(output.ticket, body, output.done, last if isinstance(last, Fault) else None)


class EngineThread:
    """Runs at most one engine in its own thread. `deliver` is called on the event loop in which this object was
    created.

    `failed` receives the exception when the engine breaks (out of memory, a bug); nothing runs after that.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._open: set[int] = set()
        self._deliveries: list[Delivery] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- called on the loop -----------------------------------------------------------------------------------

    def add(self, ticket: int, request: Generate) -> None:
        self._calls.put(lambda: self._add(ticket, request))

    def abort(self, ticket: int) -> None:
        self._calls.put(lambda: self._abort(ticket))

    async def install(self, engine: Engine | None, fault: Fault) -> None:
        """Serve this engine, or none. The previous engine's open requests end with `fault`."""
        await self.call(lambda _: self._install(engine, fault))

    async def change(self, change: Callable[[Engine], None], expected: Expected | None = None) -> CanaryCheck | None:
        """Change the engine's weights, then check them before anything is computed with them.

        Raises whatever `change` raises, or `CanaryFailed` if the check fails, after which the thread has no engine.
        """

        def turn(engine: Engine | None) -> CanaryCheck | None:
            if engine is None:
                raise EngineFault("there is no engine whose weights could be changed")
            change(engine)
            try:
                return None if expected is None else engine.check_canary(expected)
            except CanaryFailed as fault:
                self._install(None, Fault(why=str(fault), code=Code.NO_REPLICA, retry=True))
                raise

        return await self.call(turn)

    async def add_adapter(self, address: str, adapter: LoadedAdapter) -> bool:
        """Call `Engine.add_adapter`. Raises `Refused` if the adapter cannot be loaded."""
        return await self.call(lambda engine: _loaded(engine).add_adapter(address, adapter))

    async def remove_adapter(self, address: str) -> None:
        """Call `Engine.remove_adapter`. Raises `Refused` if the adapter cannot be unloaded."""
        await self.call(lambda engine: _loaded(engine).remove_adapter(address))

    async def adapters(self) -> list[AdapterUse]:
        """Return the loaded adapters, least recently used first."""

        def listed(engine: Engine | None) -> list[AdapterUse]:
            loaded = [] if engine is None else engine.adapters.items()
            return [AdapterUse(address, adapter.bytes, adapter.uses) for address, adapter in loaded]

        return await self.call(listed)

    async def call(self, work: Callable[[Engine | None], T]) -> T:
        """Run `work` on the engine between two steps. Raises what `work` raises."""
        done: asyncio.Future[T] = self._loop.create_future()

        def turn() -> None:
            try:
                result = work(self._engine)
            except Exception as error:  # raised again in the caller that awaits `call`
                self._loop.call_soon_threadsafe(_fail, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, result)

        self._calls.put(turn)
        return await done

    @property
    def stats(self) -> Stats | None:
        """The engine's counts, read while it may be running. Each count is correct, but they may be from different
        steps."""
        engine = self._engine
        return None if engine is None else engine.stats

    async def stop(self) -> None:
        """End the thread after its current step. Open requests end with a fault; another replica may retry them."""
        self._calls.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # ---- called in the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_calls()
                if self._engine is not None and self._engine.has_work:
                    self._deliveries += map(_delivery, self._engine.step())
                self._hand_over()
        except Exception as error:  # ends the thread; the event loop is notified and ends the process
            log.exception("the engine broke")
            self._drop_all(Fault(why=f"the replica's engine broke: {error}", code=Code.INTERNAL, retry=True))
            self._hand_over()
            self._loop.call_soon_threadsafe(_fail, self.failed, error)

    def _take_calls(self) -> None:
        """Run all calls that have arrived. Wait for a call if there is nothing else to do."""
        try:
            if self._engine is None or not self._engine.has_work:
                self._calls.get()()
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            pass

    def _hand_over(self) -> None:
        """Pass on everything that a step produced, waking the event loop only once."""
        if not self._deliveries:
            return
        deliveries, self._deliveries = self._deliveries, []
        for delivery in deliveries:
            if delivery.done:
                self._open.discard(delivery.ticket)
        self._loop.call_soon_threadsafe(self._deliver, deliveries)

    def _add(self, ticket: int, request: Generate) -> None:
        if self._engine is None:
            self._deliveries.append(failure(ticket, NOTHING_LOADED))
            return
        try:
            self._engine.add(ticket, request)
        except Refused as refused:
            self._deliveries.append(failure(ticket, refusal_fault(refused)))
        else:
            self._open.add(ticket)

    def _abort(self, ticket: int) -> None:
        self._open.discard(ticket)
        if self._engine is not None:
            self._engine.abort(ticket)

    def _install(self, engine: Engine | None, fault: Fault) -> None:
        self._drop_all(fault)
        self._engine = engine

    def _drop_all(self, fault: Fault) -> None:
        self._deliveries += [failure(ticket, fault) for ticket in self._open]
        self._open.clear()

    def _stop(self) -> None:
        self._stopping = True
        self._install(None, STOPPING)


def _loaded(engine: Engine | None) -> Engine:
    if engine is None:
        raise Refused(Code.NO_REPLICA, NOTHING_LOADED.why)
    return engine


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
