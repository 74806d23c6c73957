"""Ownership of a run: become its trainer, notice when it ends, and publish facts under its trainer epoch (R11).

service.py decides what to do with an owned run.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from typing import TypedDict

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.bus.wire import ReceivedMessage
from bombus.config.job import RunConfig
from bombus.errors import BusUnavailable, EngineFault, Refused
from bombus.faults import Point, reached
from bombus.hive.events import AnyEvent, BatchReady, WeightsRemoved
from bombus.hive.inbox import Done, Message, TrainerOpens
from bombus.hive.operations.state import kept_id
from bombus.hive.state import EngineState, Phase
from bombus_trainer.options import TrainerOptions

log = logging.getLogger(__name__)

OPEN_S = 30.0
LOOK_S = 1.0  # how often a trainer that waits for the log checks for a new connection


class FactHead(TypedDict):
    """The fields that all facts of a trainer have."""

    id: str
    engine: str
    run: int
    trainer_epoch: int


class RunOver(Exception):
    """Raised when the run was stopped, has failed, or was opened by another trainer."""


class RunOwnership:
    """One trainer's ownership of its engine's runs, one run after the other. `follow()` must run as its own task.

    A superseded trainer stands aside only while its successor answers pings. Safety does not depend on the pings, since
    facts from an older trainer epoch are ignored: an answer that comes too late costs an attempt, never a step. If a
    superseded trainer waited for a fixed time instead, two live trainers would keep superseding each other and never
    finish a step that takes longer than that time.
    """

    def __init__(self, bus: Bus, options: TrainerOptions, name: str) -> None:
        self.run = 0  # the run that we own, or the last one that we owned
        self.epoch = 0  # the trainer epoch in which we opened it; 0 until it is opened
        self.over = threading.Event()  # read by the training thread between micro-batches
        self.doing: Callable[[], str] = str  # describes the trainer's current work
        self.removed: set[str] = set()  # callers' checkpoints whose folders can be deleted
        self.batch_trace = ""  # trace context of the episode end that completed the newest batch
        self._bus = bus
        self._options = options
        self._name = name
        self._follower = Follower(bus, self._on_event, strict=True)
        self._connections = 0
        bus.on_reconnect(self._count_connection)

    # ---- the state of the run ---------------------------------------------------------------------------------

    @property
    def engine(self) -> EngineState:
        return self._follower.hive.engine(self._options.engine)

    @property
    def job(self) -> RunConfig:
        """The job of the run. Raises `EngineFault` if it has none."""
        active = self.engine.active
        if active is None:
            raise EngineFault(
                "the engine runs without a configuration, so there is no model to load: configure it with a job whose "
                "model.path names one"
            )
        return RunConfig.from_json(active.config)

    async def follow(self) -> None:
        await self._follower.run()

    async def caught_up(self) -> None:
        await self._follower.caught_up()

    async def next_run(self) -> None:
        """Wait for a run that we have not owned yet, and become its owner. Runs without either a policy or operations
        are skipped."""
        await self._follower.wait_for(lambda _: self._is_new(self.engine))
        self.run = self.engine.run

    def _is_new(self, engine: EngineState) -> bool:
        return engine.run > self.run and (engine.has_policy or engine.serves_operations)

    def is_running(self) -> bool:
        return self.engine.phase != Phase.OFFLINE and self.engine.run == self.run

    def is_over(self) -> bool:
        """Return whether the run has ended, or another trainer has opened it since (in a later epoch than ours)."""
        superseded = self.epoch > 0 and self.engine.trainer_epoch > self.epoch
        return superseded or not self.is_running()

    def _count_connection(self) -> None:
        self._connections += 1

    def _on_event(self, _position: int, event: AnyEvent) -> None:
        if isinstance(event, BatchReady):
            self.batch_trace = self._follower.traceparent
        elif isinstance(event, WeightsRemoved) and event.engine == self._options.engine:
            self.removed.add(kept_id(event.model, event.use, event.name))
        if self.is_over():
            self.over.set()

    async def wait(self, holds: Callable[[EngineState], bool], timeout_s: float | None = None) -> None:
        """Wait until `holds(engine)` is true. Raises `RunOver` if the run ends first, or `TimeoutError` after
        `timeout_s`."""
        await self._follower.wait_for(lambda _: self.is_over() or holds(self.engine), timeout_s)
        self.check()

    def check(self) -> None:
        """Raise `RunOver` if the run is over for this trainer."""
        if self.is_over():
            raise RunOver

    async def pause(self, seconds: float) -> None:
        try:
            await self.wait(lambda _: False, seconds)
        except TimeoutError:
            pass

    # ---- opening and giving up a run --------------------------------------------------------------------------

    async def open(self) -> None:
        """Become the run's trainer. From then on, facts from earlier trainers are ignored. Raises `RunOver` if the run
        cannot be opened or is over."""
        self.epoch = 0
        self.over.clear()
        opens = TrainerOpens(
            id=f"{self._name}-{self.run}-{secrets.token_hex(4)}",  # each opening has its own epoch
            engine=self._options.engine,
            run=self.run,
            trainer=self._name,
            patience_s=self._options.silence_s,
        )
        reached(Point.TRAINER_OPENING)
        while True:
            try:
                answer = await self._bus.inbox.request(opens, OPEN_S)
                break
            except BusUnavailable as error:
                log.warning("opening run %d: %s", self.run, error)
                await self.pause(self._options.retry_s)
            except Refused as refused:
                log.info("run %d cannot be opened: %s", self.run, refused.why)
                raise RunOver from None
        assert isinstance(answer, Done)
        await self._follower.wait_position(answer.position, OPEN_S)
        self.epoch = answer.epoch
        await self._answer_pings(answer.epoch)
        reached(Point.TRAINER_OPENED)
        self.check()

    async def stand_aside(self) -> None:
        """Wait until the run has ended, or until the trainer that opened it after us is gone."""
        if self.is_running():
            reached(Point.TRAINER_SUPERSEDED)
        patience_s = self._options.presence_s
        while self.is_running() and self.engine.trainer:
            try:
                await self._follower.wait_for(lambda _: not self.is_running(), patience_s)
            except TimeoutError:
                epoch = self.engine.trainer_epoch
                alive = await self._is_alive(epoch, patience_s)
                if not alive and self.engine.trainer_epoch == epoch:
                    log.warning("the trainer of run %d, epoch %d, is gone: taking over", self.run, epoch)
                    return

    async def _answer_pings(self, epoch: int) -> None:
        """Answer pings to this trainer epoch until the connection is closed.

        A process that is gone has no subscription, and a process that hangs does not answer.
        """

        async def answer(message: ReceivedMessage) -> None:
            await self._bus.answer(message.reply, Done(epoch=epoch, doing=self.doing()))

        await self._bus.client.subscribe(self._bus.subjects.trainer(self._options.engine, epoch), cb=answer)

    async def _is_alive(self, epoch: int, timeout_s: float) -> bool:
        """Return whether the trainer of that epoch answers within `timeout_s`, or true if the bus itself is down."""
        try:
            await self._bus.requests.request(
                self._bus.subjects.trainer(self._options.engine, epoch), timeout_s=timeout_s
            )
        except BusUnavailable:
            return not self._bus.is_connected
        return True

    # ---- facts ------------------------------------------------------------------------------------------------

    def head(self, name: str) -> FactHead:
        """Return the first fields of a fact, with an id that `name` makes unique in this trainer epoch."""
        return {"id": self.id(name), "engine": self._options.engine, "run": self.run, "trainer_epoch": self.epoch}

    async def send(self, fact: Message) -> None:
        """Put a fact into the inbox, retrying while the bus is down. Raises `RunOver` if the run ends first."""
        await self._bus.inbox.send_when_back(fact, lambda: self.pause(self._options.retry_s))

    async def say(self, fact: Message, shows: Callable[[EngineState], bool], said: Point | None = None) -> None:
        """Put a fact into the inbox and wait until the log shows it. Raises `RunOver` if the run ends first.

        After each reconnection, the fact is sent again under the same id, because a power failure may have lost the end
        of the inbox (R6).
        """
        while True:
            connections = self._connections
            await self.send(fact)
            if said is not None:
                reached(said)
            while connections == self._connections:
                try:
                    return await self.wait(shows, LOOK_S)
                except TimeoutError:
                    pass

    def id(self, what: str) -> str:
        """Return the id of a fact. It is the same each time the fact is sent."""
        return f"{self._options.engine}-{self.run}-{self.epoch}-{what}"
