"""Handles and reports a run's failures in the trainer: retries, waits for the operator, or ends the run."""

import gc
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn, TypeVar

from torch import AcceleratorError

from bombus.errors import BombusError, BusUnavailable
from bombus.hive.inbox import EngineBroke, StageReached
from bombus.hive.state import LOAD_FAILED, Phase
from bombus.weights.checkpoints import CheckpointDamaged
from bombus_trainer.backend import BackendLost, Interrupted
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ownership import RunOver, RunOwnership
from bombus_trainer.recovery.faults import LoadPatience, backoff, lacks_room, may_pass

log = logging.getLogger(__name__)

REASON_CHARS_MAX = 2000
T = TypeVar("T")


@dataclass
class FailedAttempts:
    """Failed attempts in a row at some work. `failures` does not count those that failed for lack of disk space."""

    attempts: int = 0
    failures: int = 0

    def clear(self) -> None:
        self.attempts = self.failures = 0


class RunReports:
    """One trainer's reports on the run that it owns."""

    def __init__(self, options: TrainerOptions, ownership: RunOwnership) -> None:
        self._options = options
        self._ownership = ownership
        self._loads = 0

    async def booted(self, load: Callable[[], Awaitable[T]], has_loaded: Callable[[], bool]) -> T:
        """Return the result of `load`.

        After a transient fault the load is retried: at first with back-off, and then each time the operator resumes the
        run. A job that cannot be trained ends the run, unless it `has_loaded` before.
        """
        await self.until_resumed()
        patience = self._patience()
        while True:
            try:
                self._loads += 1
                await self.stage("loading the model", f"loading-{self._loads}")
                return await load()
            except (BackendLost, BusUnavailable, Interrupted, RunOver):
                raise
            except Exception as error:  # a user's model may fail in any way; report it
                log.exception("run %d: the model cannot be loaded", self._ownership.run)
                reason = reason_of(error)
                if not may_pass(error, has_loaded=has_loaded()):
                    await self.give_up(reason)
                is_damaged = isinstance(error, CheckpointDamaged)
            gc.collect()  # free this attempt's memory for the next
            pause_s = None if is_damaged else patience.pause(perf_counter())
            if pause_s is not None:
                await self.stage(f"{LOAD_FAILED}{reason}", f"failed-{self._loads}")
                await self._ownership.pause(pause_s)
            else:
                times = f" {patience.failures} times" if patience.failures else ""
                await self.suspend(f"the model could not be loaded{times}: {reason}")
                await self.until_resumed()
                patience = self._patience()

    def counts(self, error: Exception, failed: FailedAttempts) -> bool:
        """Count a failed attempt, and return whether to report it.

        An attempt that failed because the bus is unavailable is neither counted nor reported. Raises `RunOver` if the
        attempt failed because the run has ended.
        """
        run = self._ownership.run
        if isinstance(error, Interrupted | RunOver):
            raise RunOver from None
        if isinstance(error, BusUnavailable):
            log.warning("run %d is waiting for the bus: %s", run, error)
            return False
        failed.attempts += 1
        failed.failures += not lacks_room(error)
        if not isinstance(error, BackendLost | AcceleratorError):
            log.exception("run %d: attempt %d failed", run, failed.attempts)
        return True

    async def pause(self, failed: FailedAttempts) -> None:
        """Wait before the next attempt, longer after each failed one. If the run waits for its operator, reset the
        count instead."""
        ownership, options = self._ownership, self._options
        if ownership.engine.waits_for_operator:
            failed.clear()
        else:
            await ownership.pause(backoff(failed.attempts, options.retry_s, options.retry_s_max))

    def _patience(self) -> LoadPatience:
        return LoadPatience(self._options.retry_s, self._options.retry_s_max, self._options.load_patience_s)

    async def stage(self, stage: str, name: str) -> None:
        """Report the stage that a booting run has reached."""
        ownership = self._ownership
        if ownership.engine.phase == Phase.BOOTING:
            message = StageReached(
                id=ownership.id(name), engine=self._options.engine, run=ownership.run, stage=stage[:REASON_CHARS_MAX]
            )
            await ownership.send(message)

    async def until_resumed(self) -> None:
        """Wait while the run is suspended."""
        ownership = self._ownership
        if ownership.engine.suspended:
            log.warning("run %d is waiting for `bombus resume`: %s", ownership.run, ownership.engine.suspended)
            await ownership.wait(lambda engine: not engine.suspended)

    async def suspend(self, reason: str) -> None:
        """Suspend the run until its operator resumes it."""
        ownership = self._ownership
        suspensions = ownership.engine.suspensions
        if not ownership.engine.waits_for_operator:
            broke = self._broke(f"stuck-{secrets.token_hex(4)}", reason, may_pass=True)
            await ownership.say(broke, lambda engine: engine.suspensions > suspensions)

    async def give_up(self, reason: str) -> NoReturn:
        """End the run."""
        await self._ownership.say(self._broke("gave-up", reason), lambda _: False)
        raise RunOver

    def _broke(self, name: str, reason: str, may_pass: bool = False) -> EngineBroke:
        return EngineBroke(**self._ownership.head(name), reason=reason[:REASON_CHARS_MAX], may_pass=may_pass)


def check_lost(error: Exception) -> None:
    """Raise `BackendLost` after an error that leaves this process unable to make any further call successfully."""
    if isinstance(error, BackendLost):
        raise error
    if isinstance(error, AcceleratorError):
        raise BackendLost(f"the device failed: {error}") from error


def reason_of(error: Exception) -> str:
    """Describe an error in one sentence, including its type if it is not one of our own."""
    why = str(error) if isinstance(error, BombusError) else f"{type(error).__name__}: {error}"
    return why[:REASON_CHARS_MAX]
