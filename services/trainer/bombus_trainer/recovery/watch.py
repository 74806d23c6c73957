"""The trainer's watchdog: sends heartbeats with the current work, and ends the process when one of its threads hangs.

A thread that hangs in a kernel or a file system cannot be ended, so the whole process must end; its supervisor starts a
new one. The watchdog's clock stops whenever the event loop does, for example while the process is stopped.
"""

import asyncio
import faulthandler
import logging
import os
from itertools import count
from time import monotonic

from bombus.bus import Bus
from bombus.errors import BusUnavailable
from bombus.hive.inbox import TrainerAlive, TrainerHangs
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ownership import RunOver, RunOwnership
from bombus_trainer.recovery.progress import STALLS, Work, Works

log = logging.getLogger(__name__)

LOOK_S = 1.0
BEAT_S = 5.0
EXIT_HUNG = 75  # exit code of a process in which a thread hangs: EX_TEMPFAIL


class Watch:
    """Watches one trainer's work. Without `stall_s` it only sends heartbeats."""

    def __init__(self, bus: Bus, options: TrainerOptions, ownership: RunOwnership) -> None:
        self.works = Works(options.stall_s, max(STALLS * options.stall_s, options.operation_timeout_s))
        self._bus = bus
        self._options = options
        self._ownership = ownership
        ownership.doing = lambda: self.works.doing

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            if self._options.stall_s:
                tasks.create_task(self._look())

    async def _look(self) -> None:
        pause_s = min(LOOK_S, self._options.stall_s / 4)
        before_s = monotonic()
        while True:
            await asyncio.sleep(pause_s)
            now_s = monotonic()
            hung = self.works.look(min(now_s - before_s, 2 * pause_s))
            before_s = now_s
            if hung is not None:
                await self._end(hung)

    async def _end(self, hung: Work) -> None:
        """Report the work that hangs, log the stack of each thread, and end this process."""
        log.critical(
            "%s has made no progress for %.0f s, but its pace allows only %.0f s: this process ends, so that its "
            "supervisor starts a new one. The stacks of its threads are:",
            *(hung, hung.still_s, self.works.limit_s(hung)),
        )
        faulthandler.dump_traceback()
        ownership = self._ownership
        fact = TrainerHangs(**ownership.head("hangs"), doing=str(hung), still_s=hung.still_s)
        try:
            ownership.check()
            await ownership.send(fact)
        except RunOver:
            log.info("run %d has already ended for this trainer", ownership.run)
        logging.shutdown()
        os._exit(EXIT_HUNG)

    async def _beat(self) -> None:
        ownership, options = self._ownership, self._options
        pause_s = min(BEAT_S, options.silence_s / 5 or BEAT_S)
        for number in count(1):
            await asyncio.sleep(pause_s)
            if not ownership.epoch or ownership.is_over():
                continue
            alive = TrainerAlive(**ownership.head(f"alive-{number}"), doing=self.works.doing)
            try:
                await self._bus.inbox.send(alive)
            except BusUnavailable as error:
                log.debug("a heartbeat could not be sent: %s", error)
