"""Samples requested with `asample`. They are drawn in the background and kept only in this gateway's memory.

After a restart these requests are unknown: they are answered with 410, and the client samples again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec

from bombus.errors import STATUS, BombusError, Code, Refused
from bombus.hive.operations.owners import may_use
from bombus.hive.records import digest
from bombus.hive.shares import has_share, surplus
from bombus.operations import Category, Failed
from bombus_gateway.access import KeyHolder
from bombus_gateway.call.capacity import CallCapacity
from bombus_gateway.operations.sampling.drawing import SampleDrawing
from bombus_gateway.operations.sampling.samplers import found_sampler
from bombus_gateway.operations_wire.dialects import PROTOBUF
from bombus_gateway.operations_wire.futures import FutureAnswer, FutureRequest, failed, ready, try_again, unknown
from bombus_gateway.operations_wire.samples import write_samples
from bombus_gateway.operations_wire.sampling import SampleRequest, SampleSubmission

log = logging.getLogger(__name__)

OPEN_BYTES_MAX = 512 << 20  # requests whose samples are being drawn
ANSWERS_MAX = 65_536  # maximum number of answers that are kept
ANSWERS_BYTES_MAX = 512 << 20  # all answers together; beyond it the oldest are forgotten, and the client resamples


class _Drawn(msgspec.Struct, frozen=True):
    """The task that draws a sample, and the holder of the key that requested it."""

    holder: KeyHolder
    task: asyncio.Task[FutureAnswer]


class SampleFutures:
    """The samples of one engine that training clients have requested from this gateway."""

    def __init__(self, drawing: SampleDrawing, capacity: CallCapacity) -> None:
        self._drawing = drawing
        self._capacity = capacity
        self._drawn: dict[str, _Drawn] = {}  # oldest first
        self._bytes: Counter[str] = Counter()  # size of answers, by the share that they count toward
        self._open_bytes: Counter[str] = Counter()

    def check(self, session: str, holder: str) -> None:
        """Raise the same `Refused` errors as `found_sampler` if the holder of a key may not use this sampler."""
        found_sampler(self._drawing.engine, session, holder)

    def submit(self, submission: SampleSubmission, body_digest: bytes, size: int, holder: KeyHolder) -> str:
        """Begin to draw samples, and return the id of the future. A request with an equal body is a repeat, with the
        same id and answer.

        Only keys with the name of `holder` can read the answer. Raises `Refused` OVERLOADED if too many requests are
        open.
        """
        name = f"{submission.request_id}:{digest(f'{holder.name}//'.encode() + body_digest).hex()[:16]}"
        if name not in self._drawn:
            with ExitStack() as room:
                room.enter_context(self._capacity.open_sample(holder.share))
                room.enter_context(self._open(size, holder.share))
                task = asyncio.create_task(self._answer(submission, holder))
                task.add_done_callback(partial(_leave, room.pop_all()))
            task.add_done_callback(partial(self._count, holder.share))
            self._drawn[name] = _Drawn(holder, task)
        return name

    @contextmanager
    def _open(self, size: int, share: str) -> Iterator[None]:
        """Count the bytes of a request while it is open. Raises `Refused` OVERLOADED if the open requests would be too
        large together."""
        if not has_share(self._open_bytes, share, OPEN_BYTES_MAX, size):
            held = sum(self._open_bytes.values())
            why = f"The open requests for samples have {held} bytes here, and the limit is {OPEN_BYTES_MAX}"
            raise Refused(Code.OVERLOADED, f"{why}; try again in a moment.")
        self._open_bytes[share] += size
        try:
            yield
        finally:
            self._open_bytes[share] -= size

    async def _answer(self, submission: SampleSubmission, holder: KeyHolder) -> FutureAnswer:
        """Return the answer. Expected errors are returned as failures."""
        asked = submission.asked
        if isinstance(asked, Failed):
            return failed(asked)
        try:
            return await self._samples(submission.session, asked, holder)
        except Refused as refusal:
            is_users = STATUS[refusal.code] < 500
            return failed(Failed(error=refusal.why, category=Category.USER if is_users else Category.SERVER))
        except BombusError as error:
            log.warning("a sample has failed", extra={"sampler": submission.session, "why": str(error)})
            return failed(Failed(error=str(error), category=Category.SERVER))

    async def _samples(self, session: str, asked: SampleRequest, holder: KeyHolder) -> FutureAnswer:
        sampler = found_sampler(self._drawing.engine, session, holder.name)
        drawn = await self._drawing.draw(sampler, asked, holder.share)
        write = partial(
            write_samples, drawn.samples, drawn.prompt_logprobs, drawn.top_prompt, drawn.cached_prompt_tokens
        )
        return FutureAnswer(200, PROTOBUF, await self._drawing.written(drawn, write))

    def _count(self, share: str, task: "asyncio.Task[FutureAnswer]") -> None:
        """Count the bytes of an answer. Beyond a limit, forget the oldest answers of the share with the most bytes."""
        self._bytes[share] += _size(task)
        while sum(self._bytes.values()) > ANSWERS_BYTES_MAX:
            most = max(self._bytes, key=self._bytes.__getitem__)
            of_most = (name for name, each in self._drawn.items() if each.holder.share == most and each.task.done())
            oldest = next(of_most, None)
            if oldest is None:
                break
            self._forget(oldest)
        for name in surplus(self._drawn, ANSWERS_MAX, lambda each: each.holder.share):
            if self._drawn[name].task.done():
                self._forget(name)

    def _forget(self, name: str) -> None:
        drawn = self._drawn.pop(name)
        self._bytes[drawn.holder.share] -= _size(drawn.task)

    def knows(self, name: str, holder: str) -> bool:
        drawn = self._drawn.get(name)
        return drawn is not None and may_use(drawn.holder.name, holder)

    async def result(self, asked: FutureRequest, hold_s: float) -> FutureAnswer:
        """Return a sample. If the sample is not ready after `hold_s`, return an answer that tells the client to ask
        again, and why."""
        drawn = self._drawn.get(asked.id)
        if drawn is None:
            return unknown(asked.id)
        task = drawn.task
        await asyncio.wait({task}, timeout=hold_s)
        if not task.done():
            return try_again(asked, self._why_it_waits())
        return ready(task.result(), asked)

    def _why_it_waits(self) -> str:
        engine = self._drawing.engine
        if engine.weights is None:
            return "The base is not published for replicas yet."
        if not engine.loaded:
            return f"No inference replica has loaded the base yet; {len(engine.replicas)} are running."
        return f"{self._capacity.open_calls} requests are open at this gateway."


def _leave(room: ExitStack, _: "asyncio.Task[FutureAnswer]") -> None:
    room.close()


def _size(task: "asyncio.Task[FutureAnswer]") -> int:
    return 0 if task.cancelled() or task.exception() is not None else len(task.result().body)
