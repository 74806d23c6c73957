"""Being a run's trainer: follows the log, opens the run, knows when it is over, says facts of its epoch (R11).

What is done with it is in service.py.
"""

import logging
import secrets
import threading
from collections.abc import Callable

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.errors import BusUnavailable, Refused
from bombus.faults import Point, reached
from bombus.hive.events import AnyEvent, BatchReady
from bombus.hive.inbox import Done, Message, TrainerOpens
from bombus.hive.state import EngineState, Phase
from bombus_trainer.options import TrainerOptions
from bombus_trainer.presence import Presence

log = logging.getLogger(__name__)

ANSWER_S = 30.0


class RunOver(Exception):
    """The run was stopped, has failed, or another trainer has opened it."""


class Tenure:
    """One trainer's place in its engine's runs, one after the other. `follow()` has to run beside everything else."""

    def __init__(self, bus: Bus, options: TrainerOptions, name: str) -> None:
        self.run = 0  # the run that is, or was last, ours
        self.epoch = 0  # the trainer epoch in which we opened it; 0: not yet
        self.over = threading.Event()  # read by the training thread between micro-batches
        self.batch_trace = ""  # of the end that completed the newest batch
        self._bus = bus
        self._options = options
        self._name = name
        self._follower = Follower(bus, self._on_event)
        self._presence = Presence(bus, options.engine)

    # ---- what the log says ------------------------------------------------------------------------------------

    @property
    def engine(self) -> EngineState:
        return self._follower.hive.engine(self._options.engine)

    async def follow(self) -> None:
        await self._follower.run()

    async def caught_up(self) -> None:
        await self._follower.caught_up()

    async def next_run(self) -> None:
        """Wait for a run that is not ours yet, and make it ours."""
        await self._follower.wait_for(lambda _: self.engine.phase != Phase.OFFLINE and self.engine.run > self.run)
        self.run = self.engine.run

    def is_running(self) -> bool:
        return self.engine.phase != Phase.OFFLINE and self.engine.run == self.run

    def is_over(self) -> bool:
        """For us: a later trainer epoch than ours is somebody else's."""
        superseded = self.epoch > 0 and self.engine.trainer_epoch > self.epoch
        return superseded or not self.is_running()

    def _on_event(self, _position: int, event: AnyEvent) -> None:
        if isinstance(event, BatchReady):
            self.batch_trace = self._follower.traceparent
        if self.is_over():
            self.over.set()

    async def wait(self, holds: Callable[[EngineState], bool], timeout_s: float | None = None) -> None:
        """Until the fold says so. Raises `RunOver` when the run ends before, `TimeoutError`."""
        await self._follower.wait_for(lambda _: self.is_over() or holds(self.engine), timeout_s)
        self.check()

    def check(self) -> None:
        """Raises `RunOver` once it is."""
        if self.is_over():
            raise RunOver

    async def pause(self, seconds: float) -> None:
        try:
            await self.wait(lambda _: False, seconds)
        except TimeoutError:
            pass

    # ---- coming and going -------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Become the run's trainer: facts of the one before us are ignored from here on. Raises `RunOver`."""
        self.epoch = 0
        self.over.clear()
        opens = TrainerOpens(
            id=f"{self._name}-{self.run}-{secrets.token_hex(4)}",  # each opening has an epoch of its own
            engine=self._options.engine,
            run=self.run,
            trainer=self._name,
        )
        reached(Point.TRAINER_OPENING)
        while True:
            try:
                answer = await self._bus.inbox.request(opens, ANSWER_S)
                break
            except BusUnavailable as error:
                log.warning("opening run %d: %s", self.run, error)
                await self.pause(self._options.retry_s)
            except Refused as refused:
                log.info("run %d is not to be trained: %s", self.run, refused.why)
                raise RunOver from None
        assert isinstance(answer, Done)
        await self._follower.wait_position(answer.position, ANSWER_S)
        self.epoch = answer.epoch
        await self._presence.announce(answer.epoch)
        reached(Point.TRAINER_OPENED)
        self.check()

    async def stand_aside(self) -> None:
        """Until the run has ended, or the trainer that opened it after us is gone."""
        if self.is_running():
            reached(Point.TRAINER_SUPERSEDED)
        patience_s = self._options.presence_s
        while self.is_running():
            try:
                await self._follower.wait_for(lambda _: not self.is_running(), patience_s)
            except TimeoutError:
                epoch = self.engine.trainer_epoch
                there = await self._presence.is_there(epoch, patience_s)
                if not there and self.engine.trainer_epoch == epoch:
                    log.warning("the trainer of run %d, epoch %d, is gone: taking over", self.run, epoch)
                    return

    # ---- what we say ------------------------------------------------------------------------------------------

    async def say(self, fact: Message) -> None:
        """Put a fact into the inbox however long the bus is away. Raises `RunOver` when the run ends meanwhile."""
        while True:
            try:
                await self._bus.inbox.send(fact)
                return
            except BusUnavailable as error:
                log.warning("a fact waits for the bus: %s", error)
                await self.pause(self._options.retry_s)

    def id(self, what: str) -> str:
        """The same fact has the same id, however often it is sent."""
        return f"{self._options.engine}-{self.run}-{self.epoch}-{what}"
