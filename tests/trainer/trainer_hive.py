"""A hive for the trainer's tests: a real bus and coordinator, and stand-ins for gateway, replica and clients."""

import asyncio
import copy
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load_file

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.config.job import RunConfig
from bombus.hive import inbox
from bombus.hive.events import AnyEvent, Event, NotedCall, Weights
from bombus.hive.fold.evolve import evolve
from bombus.hive.inbox import EpisodeResult
from bombus.hive.records import CallRef, digest, encode_record
from bombus.hive.state import EngineState, Hive, Phase
from bombus.replay.audit.audit import Audit
from bombus.replay.audit.report import AuditReport
from bombus_coordinator.shell import Coordinator
from bombus_trainer.options import TrainerOptions
from bombus_trainer.service import Trainer
from tests.patience import PATIENCE_S
from tests.trainer.small_batches import call, tiny_model_folder

log = logging.getLogger(__name__)

ENGINE = "main"
REPLICA = "r1"
WAIT_S = PATIENCE_S


def audited(events: Sequence[Event]) -> AuditReport:
    audit = Audit()
    for seq, event in enumerate(events, 1):
        audit.read(event, seq)
    return audit.report()


def audited_from_anywhere(events: Sequence[Event]) -> None:
    """Audit a log that was compacted before each of its events."""
    hive = Hive()
    for cut, event in enumerate(events):
        audit = Audit(copy.deepcopy(hive), cut)
        for seq, later in enumerate(events[cut:], cut + 1):
            audit.read(later, seq)
        assert not audit.report().differences, f"compacted before event {cut + 1}"
        evolve(hive, event)


class Stage:
    """A hive with a coordinator, ready to be configured. `engine` is the engine's state, folded from the log."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.folder = folder
        self.options = TrainerOptions(
            engine=ENGINE, folder=folder / "trainer", retry_s=0.01, retry_s_max=0.02, presence_s=1.0
        )
        self.events: list[AnyEvent] = []
        self.follower = Follower(bus, lambda _, event: self.events.append(event))
        self.trainers: list[asyncio.Task[None]] = []
        self._ids = itertools.count()

    @property
    def engine(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    def id(self) -> str:
        return f"test-{next(self._ids)}"

    async def until(self, phase: Phase, version: int = -1) -> None:
        await self.follower.wait_for(lambda _: self.engine.phase == phase and self.engine.version >= version, WAIT_S)

    def job(self, max_staleness: int = 0, **trainer: object) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"path": str(self.folder / "model")},
                "rollout": {"num_repeat": 2},
                "collection": {"batch_size": 2, "max_staleness": max_staleness},
                "trainer": {"lr": 0.01, "lora_rank": 0, **trainer},
            }
        )

    async def start(self, job: RunConfig) -> None:
        await self.configure(job)
        await self.restart()

    async def configure(self, job: RunConfig) -> None:
        await self.bus.inbox.request(job.to_command(self.id(), ENGINE))

    async def restart(self) -> None:
        answer = await self.bus.inbox.request(inbox.Start(id=self.id(), engine=ENGINE))
        await self.follower.wait_position(answer.position)

    def train(self, name: str = "", options: TrainerOptions | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(Trainer(self.bus, options or self.options, name).run())
        self.trainers.append(task)
        return task

    async def replica(self) -> None:
        """Act as a replica that serves each new version at once."""
        while True:
            await self.say(
                inbox.ReplicaAlive(
                    id=self.id(),
                    engine=ENGINE,
                    replica=REPLICA,
                    url="http://replica",
                    run=self.engine.run,
                    version=self.engine.version,
                )
            )
            await self._something_newer(self.engine.run, self.engine.version)

    async def _something_newer(self, run: int, version: int) -> None:
        try:
            await self.follower.wait_for(lambda _: (self.engine.run, self.engine.version) != (run, version), 1.0)
        except TimeoutError:
            pass

    async def say(self, fact: inbox.Message) -> None:
        await self.bus.inbox.send(fact)

    async def play_batch(
        self,
        spoil: str = "",
        shift: int = 0,
        noted: int = 0,
        versions: tuple[int, int] = (0, 0),
        reward: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        """Play two tasks of two episodes, of two turns each; `spoil` breaks the reference of that task's last
        call.

        The same `shift` gives the same tokens, in any hive. The tokens of the two tasks are of `versions`; `noted` is
        the version that is reported to the coordinator, at least the one at which the run began. Of a task's episodes
        one has the `reward`, the other 0.
        """
        noted = max(noted, self.engine.begun)
        for task, version in zip(("t1", "t2"), versions, strict=True):
            claim = inbox.Claim(id=self.id(), engine=ENGINE, claim=self.id(), client="c", count=2, wait_s=5.0)
            granted = await self.bus.inbox.request(claim)
            assert isinstance(granted, inbox.Granted)
            results = []
            for number, episode in enumerate(granted.episodes):
                make = partial(call, episode=episode, version=version, temperature=temperature)
                first = make(f"{episode}-a", list(range(18)), [20 + (number + shift) % 8, 21])
                second = make(f"{episode}-b", [5, 6], [30 + (number + shift) % 8, 31, 32], parent=first)
                for record in (first, second):
                    body = encode_record(record)
                    ack = await self.bus.publisher.publish(self.bus.subjects.call(ENGINE, ""), body, msg_id=record.id)
                    spoiled = task == spoil and record is second
                    ref = CallRef(ack.seq, record.id, b"x" * 16 if spoiled else digest(body))
                    said_of = NotedCall(
                        episode, ref, record.prompt_tokens, record.completion_tokens(), oldest=noted, newest=noted
                    )
                    await self.say(inbox.CallRecorded(id=self.id(), engine=ENGINE, run=self.engine.run, call=said_of))
                said = {"label": f"answer {number}"}
                results.append(EpisodeResult(episode=episode, task=task, reward=reward * number, metadata=said))
            await self.bus.inbox.request(inbox.End(id=self.id(), engine=ENGINE, client="c", results=tuple(results)))

    async def feed(self) -> None:
        """Play a batch whenever the engine rolls; step k's is the same in every hive."""
        while True:
            await self.follower.wait_for(
                lambda _: self.engine.phase == Phase.ROLLING and self.engine.step == self.engine.version
            )
            step = self.engine.step + 1
            await self.play_batch(shift=step)
            await self.follower.wait_for(lambda _, step=step: self.engine.step == step)  # type: ignore[misc]


@asynccontextmanager
async def staged(bus: Bus, folder: Path, serves: bool = True, sound: bool = True) -> AsyncIterator[Stage]:
    """Start a hive with the tiny model in `folder`; everything that runs in it is cancelled afterwards.

    Unless it `serves`, it has no replica but those of the test. If its bookkeeping is `sound`, its log is audited.
    """
    tiny_model_folder(folder / "model")
    stage = Stage(bus, folder)
    coordinator = Coordinator(bus)
    tasks = [asyncio.create_task(each) for each in (coordinator.lead(), stage.follower.run())]
    await coordinator.leading.wait()
    if serves:
        tasks.append(asyncio.create_task(stage.replica()))
    try:
        yield stage
        found = audited(stage.events).differences if sound else ()
        assert not found, found
    finally:
        for task in (*tasks, *stage.trainers):
            task.cancel()
        over = await asyncio.gather(*tasks, *stage.trainers, return_exceptions=True)
        for error in over:
            if isinstance(error, Exception):  # otherwise a test only times out when its coordinator is gone
                log.error("a part of the hive had ended", exc_info=error)


def served(weights: Weights) -> dict[str, torch.Tensor]:
    file = Path(weights.where) / "model.safetensors"
    assert sha256(file.read_bytes()).hexdigest() == weights.sha256
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors
