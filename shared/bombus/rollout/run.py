"""Plays all episodes of a plan, a fixed number at a time, and cleans up however the run ends."""

import asyncio
import itertools
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bombus.hive.failures import FailureKind
from bombus.rollout.episode import EpisodePlayer, Pointless
from bombus.rollout.plan import RolloutPlan
from bombus.rollout.records import FailuresInARow, LossReason, LostEpisode, PlayedEpisode, RecordFolder, RolloutTally
from bombus.rollout.schedule import Attempt, Schedule
from bombus.rollout.tasks import AgentTask
from bombus.rollout.watch import EpisodeWatch
from bombus.rollout.workspace import remove_folder
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import SwarmError
from bombus.task_groups import first_failure

log = logging.getLogger("bombus")

ABORT_S = 15.0  # time for the request that aborts the open episodes at the end
STEP_LOOK_S = 1.0
FAILURE_PAUSE_S = 1.0  # a worker's pause before its next episode after an infrastructure failure


class RolloutListener:
    """Receives the events of a rollout. This base class ignores all of them."""

    def changed(self, tally: RolloutTally) -> None: ...

    def finished(self, task: AgentTask, result: PlayedEpisode | LostEpisode, tally: RolloutTally) -> None: ...

    def stepped(self, rewards: Sequence[float], tally: RolloutTally) -> None:
        """Handle a step of the trainer. `rewards` contains the rewards added since the trainer's previous step."""


class RolloutRun:
    """One run of a plan. `tally` counts its episodes, and remains valid if the run is interrupted."""

    def __init__(self, plan: RolloutPlan, client: AsyncSwarmClient, repeat: int, listener: RolloutListener) -> None:
        options = plan.options
        self._plan = plan
        self._client = client
        self._listener = listener
        self._kept = RecordFolder(options.out) if options.out is not None else None
        done = self._kept.played() if self._kept is not None else None
        self.done_before = sum(done.values()) if done else 0  # played by earlier runs, according to `--out`'s folder
        self._schedule = Schedule(plan.tasks, repeat, plan.epochs, options.seed, done)
        self._watch = EpisodeWatch(client, plan.limits)
        self._player = EpisodePlayer(plan, client, self._watch, self._kept)
        self._numbers = itertools.count()  # names for episodes' folders, never reused: removing a folder may fail
        self._failures = FailuresInARow(len(plan.tasks))
        self.tally = RolloutTally(self._schedule.total if options.steps is None else None)

    async def run(self) -> None:
        """Play until no episode is left, or the trainer has made `steps` steps. Raises `Pointless`, or an error of the
        client."""
        async with _scratch(self._plan.options.scratch) as scratch, self._nothing_left_open():
            await self._play_all(scratch)

    async def _play_all(self, scratch: Path) -> None:
        first_step = await self._client.get_global_step()
        async with first_failure() as group:
            helpers = [group.create_task(self._watch.run())]
            slots = range(self._plan.options.concurrency)
            workers = [group.create_task(self._work(scratch)) for _ in slots]
            if not self._plan.options.eval:
                helpers.append(group.create_task(self._follow_steps(first_step, workers)))
            await asyncio.wait(workers)
            for helper in helpers:
                helper.cancel()

    async def _work(self, scratch: Path) -> None:
        """Play one episode after another, each in its own folder."""
        while (attempt := self._schedule.next()) is not None:
            self.tally.running += 1
            self._listener.changed(self.tally)
            try:
                result = await self._player.play(attempt.task, scratch / str(next(self._numbers)))
            finally:
                self.tally.running -= 1
            self._note(attempt, result)
            if _has_failed(result):
                await asyncio.sleep(FAILURE_PAUSE_S)

    def _note(self, attempt: Attempt, result: PlayedEpisode | LostEpisode) -> None:
        self._keep(attempt.task, result)
        if not self._plays_again(attempt, result):
            self.tally.add(result)
        self._listener.finished(attempt.task, result, self.tally)
        if why := self._failures.add(attempt.task, result):
            raise Pointless(why)

    def _keep(self, task: AgentTask, result: PlayedEpisode | LostEpisode) -> None:
        if self._kept is None:
            return
        try:
            self._kept.add(task, result)
        except OSError as error:
            raise Pointless(f"--out {self._plan.options.out} can no longer be written: {error.strerror}") from error

    def _plays_again(self, attempt: Attempt, result: PlayedEpisode | LostEpisode) -> bool:
        """Requeue a lost episode and return True, unless its agent was at fault or it has no retries left.

        An episode that the hive took back does not use up a retry.
        """
        if isinstance(result, PlayedEpisode) or result.loss == LossReason.LIMIT:
            return False
        failed = _has_failed(result)
        if failed and attempt.failed >= self._plan.options.retries:
            return False
        self._schedule.again(attempt, failed=failed)
        return True

    async def _follow_steps(self, first: int, workers: Sequence["asyncio.Task[None]"]) -> None:
        """Count the trainer's steps from `first`, and stop the workers when the wanted number is reached.

        Workers that are reporting a reward may finish, so that the tally includes all episodes in the trainer's
        batches.
        """
        wanted = self._plan.options.steps
        while wanted is None or self.tally.steps < wanted:
            await asyncio.sleep(STEP_LOOK_S)
            self._note_steps(await self._client.get_global_step() - first)
        self._schedule.stop()
        for worker in workers:
            if worker not in self._player.reporting:
                worker.cancel()

    def _note_steps(self, steps: int) -> None:
        if steps > self.tally.steps:
            self._listener.stepped(self.tally.stepped(steps), self.tally)
        self._listener.changed(self.tally)

    @asynccontextmanager
    async def _nothing_left_open(self) -> AsyncIterator[None]:
        """Abort the episodes that are still open at the end."""
        try:
            yield
        finally:
            if self._player.unfinished:
                try:
                    async with asyncio.timeout(ABORT_S):
                        await self._client.abort_episodes(
                            list(self._player.unfinished), failure=FailureKind.CLIENT, detail="the rollout was stopped"
                        )
                except (SwarmError, TimeoutError) as error:
                    log.warning("open episodes could not be aborted; the hive will end them once idle: %s", error)


def _has_failed(result: PlayedEpisode | LostEpisode) -> bool:
    return isinstance(result, LostEpisode) and result.loss == LossReason.INFRA


@asynccontextmanager
async def _scratch(parent: Path) -> AsyncIterator[Path]:
    """Make a folder for the episodes' folders, and remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix="bombus-rollout-", dir=parent))
    try:
        yield path
    finally:
        await asyncio.to_thread(remove_folder, path)
