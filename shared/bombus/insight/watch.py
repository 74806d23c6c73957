"""Reads a log while somebody looks at it, and follows it if its hive is running."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager

from bombus.bus import ServerRefused, Stored
from bombus.bus.follow import read_event
from bombus.errors import BombusError, BusUnavailable, NewerEvent, StreamEndLost
from bombus.hive.state import Hive
from bombus.insight.keyframes import Keyframes, moment_at
from bombus.insight.record import Moment, Record
from bombus.insight.runs import ANSWERS_READ, read_answers
from bombus.replay.diagnosis.steps import RunSeries, StepFigures
from bombus.replay.episode.story import read_story
from bombus.replay.episode.tree import EpisodeTranscript, read_transcript
from bombus.replay.source import NotOnLog, Source

log = logging.getLogger(__name__)

IDLE_S = 300.0
RETRY_S = 2.0
PAUSE_S = 1.0  # between two times that new events are read, and that viewers are told of them
SLICE = 256  # events that are folded before other tasks may go on
MOMENTS_KEPT = 4

OpenLog = Callable[[], AbstractAsyncContextManager[Source]]


class LogWatch:
    """A log that is read from when somebody first looks until `idle_s` seconds after nobody does.

    Once `is_ready`, `source` and `record` are set. `end` is the event up to which the log has to be read until then.
    `error` says why it cannot be read at present; what was read stays meanwhile, without a `source`. `failure` is why
    nobody tries again. `title` says where the log is stored, and `hive` is the name of its hive.
    """

    def __init__(self, open_log: OpenLog, idle_s: float = IDLE_S, moment: type[Moment] = Moment) -> None:
        self.source: Source | None = None
        self.record: Record | None = None
        self.title = self.hive = ""
        self.end = 0
        self.is_ready = False
        self.error = ""
        self.failure: Exception | None = None
        self._open_log = open_log
        self._idle_s = idle_s
        self._moment = moment
        self._viewers = 0
        self._keyframes: Keyframes | None = None
        self._newest: Stored | None = None  # the event that was read last
        self._led_ns = 0  # when a leader was last at work, 0 if that is unknown
        self._moments: dict[int, Moment] = {}
        self._answered: set[int] = set()  # steps, by `done_seq`
        self._reading: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_closing = False
        self.changed = asyncio.Event()  # set at the next change, and then replaced

    @property
    def position(self) -> int:
        return 0 if self.record is None else self.record.live.position

    @property
    def is_running(self) -> bool:
        """Whether the log's hive may still add to it."""
        return self.source is not None and self.source.running

    def touch(self) -> None:
        """Say that somebody looks: begin to read, or go on for another `idle_s` seconds."""
        if self.is_closing:
            return
        if self._task is None or self._task.done() or self._task.cancelling():
            self._task = asyncio.create_task(self._run(self._task))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._rest)

    def _rest(self) -> None:
        if self._viewers:
            self.touch()
        elif self._task is not None:
            self._task.cancel()

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count a viewer while the block runs."""
        self._viewers += 1
        self.touch()
        try:
            yield
        finally:
            self._viewers -= 1
            self.touch()

    def stop_viewing(self) -> None:
        """End what streams changes to viewers: the server is stopping."""
        self.is_closing = True
        self._notify()

    async def close(self) -> None:
        self.is_closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def at(self, position: int) -> Moment:
        """Return the state at a position of the log, for reading only. Raises `NotOnLog`, `BusUnavailable`, or what
        reading raises."""
        record, source, keyframes = self.record, self.source, self._keyframes
        if record is None or keyframes is None:
            raise BusUnavailable(self.error or "the log is not read yet")
        if position == record.live.position:
            return record.live
        if not record.first <= position <= record.live.position:
            raise NotOnLog(f"there is no event {position}: the log goes from {record.first} to {record.live.position}")
        if (known := self._moments.get(position)) is not None:
            return known
        if source is None:
            raise BusUnavailable(self.error)
        moment = self._moments[position] = await moment_at(source, keyframes, position)
        while len(self._moments) > MOMENTS_KEPT:
            del self._moments[next(iter(self._moments))]
        return moment

    async def transcript(self, episode: str, position: int) -> EpisodeTranscript:
        """Return an episode as it was at a position. Raises the same errors as `at`."""
        record, source = self.record, self.source
        if record is None or source is None:
            raise BusUnavailable(self.error or "the log is not read yet")
        before = await self.at(min(max(record.first, record.claimed_at(episode) - 1), position))
        start = before.copy()  # reading changes it
        return await read_transcript(source, await read_story(source, episode, (start.hive, start.position), position))

    def now_ns(self, moment: Moment) -> tuple[int, int]:
        """Return the time to show a state at, and when a leader was last at work (0 if unknown)."""
        if self.record is None or moment is not self.record.live:
            return moment.now_ns, 0
        return max(moment.now_ns, self._led_ns, time.time_ns() if self.is_running else 0), self._led_ns

    def read_answers(self, series: RunSeries) -> None:
        """Begin to read the sampled answers of a run's newest steps, which a diagnosis needs, if there are unread
        ones."""
        unread = [row for row in series.steps[-ANSWERS_READ:] if row.done_seq not in self._answered]
        if unread and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read_answers(series, unread))

    async def _read_answers(self, series: RunSeries, unread: Sequence[StepFigures]) -> None:
        source, record = self.source, self.record
        if source is None or record is None:
            return
        self._answered |= {row.done_seq for row in unread}
        try:
            await read_answers(source, unread)
        except (BombusError, OSError) as error:
            log.warning("the answers of run %s cannot be read: %s", series.name, error)
        record.examine_again(series, unread[0].done_seq)
        self._notify()

    # ---- reading ----------------------------------------------------------------------------------------------

    async def _run(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.gather(previous, return_exceptions=True)
        try:
            while True:
                try:
                    async with self._open_log() as self.source:
                        await self._read(self.source)
                        await asyncio.Event().wait()  # the source stays open for pages that read episodes
                except (BusUnavailable, ServerRefused) as error:
                    if self.position < self.end:  # it was not read up to there yet
                        self._forget()
                    self._failed(str(error))
                except (NotOnLog, StreamEndLost) as error:
                    self._forget()
                    self._failed(str(error))
                await asyncio.sleep(RETRY_S)
        except Exception as error:  # a bug too: the page says so, instead of reading for ever
            self.failure = error
            is_bug = not isinstance(error, BombusError | OSError | ValueError)
            if is_bug:
                log.exception("the log cannot be shown")
            self._failed(f"{type(error).__name__}: {error}" if is_bug else str(error))
        finally:
            self._forget()

    def _failed(self, why: str) -> None:
        self.source, self.is_ready, self.error = None, False, why
        self._notify()

    def _forget(self) -> None:
        self.source = self.record = self._newest = None
        self.is_ready = False
        self._moments.clear()
        self._answered.clear()
        if self._reading is not None:
            self._reading.cancel()
        if self._keyframes is not None:
            self._keyframes.close()
            self._keyframes = None

    async def _read(self, source: Source) -> None:
        """Fold the log up to its present end, unless that was done, and then what a running hive adds, at most once
        every `PAUSE_S` seconds."""
        self.title, self.hive = source.title, source.hive
        if self.record is None:
            self.end, self.error = (await source.end()).seq, ""
            self.begin(*await source.base())
            async with aclosing(source.in_order(self.position)) as messages:
                async for stored in messages:
                    self.take(stored)
                    if stored.seq % SLICE == 0:
                        self._notify()
                        await asyncio.sleep(0)
        self._led_ns = await source.led_ns()
        self.is_ready, self.error, self.failure = True, "", None
        self._notify()
        while source.running:
            await asyncio.sleep(PAUSE_S)
            self._led_ns = await source.led_ns()
            async with aclosing(source.newer(self.position, self._newest)) as batches:
                async for batch in batches:
                    for stored in batch:
                        self.take(stored)
                    self._notify()
                    await asyncio.sleep(0)

    def begin(self, hive: Hive, position: int) -> None:
        """Begin to fold at the state `hive` at `position`. `take` folds what comes after it."""
        self.record = Record(hive, position, self._moment)
        self._keyframes = Keyframes(self.record.live)

    def take(self, stored: Stored) -> None:
        assert self.record is not None
        assert self._keyframes is not None
        if stored.seq != self.position + 1:
            raise NotOnLog(f"the log was compacted beyond event {self.position}: it is read again")
        self._newest = stored
        try:
            self.record.fold(stored.seq, read_event(stored), stored.written_ns)
        except NewerEvent as error:
            if not self.is_running:
                raise
            log.warning("%s. The page leaves out such events until then", error)
            self.record.live.position = stored.seq
        if stored.seq >= self._keyframes.next:
            self._keyframes.keep(self.record.live)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
