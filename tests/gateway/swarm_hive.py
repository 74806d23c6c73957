"""A whole hive in one process for tests of the swarm API: a real bus, the real coordinator and the real gateway.

The trainer and the replica are played: they send the messages of real ones, without a model.
"""

import asyncio
import copy
import json
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from bombus.bus import Bus, Reader
from bombus.bus.follow import Follower
from bombus.commands.audit import audited
from bombus.hive import inbox
from bombus.hive.episodes import without_secret
from bombus.hive.events import NotedCall, Weights
from bombus.hive.records import (
    CallRecord,
    CallRef,
    CallStatus,
    Choice,
    SamplingParams,
    digest,
    encode_record,
    pack_logprobs,
    pack_tokens,
)
from bombus.hive.state import EngineState, Phase
from bombus.machine.http_server import http_server
from bombus.replay.source import BusSource
from bombus_coordinator.shell import Coordinator
from bombus_gateway.app import create_app
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings
from tests.patience import PATIENCE_S

ENGINE = "main"
REPLICA = "replica-1"
JOB = {
    "ajet": {
        "model": {"path": "tiny"},
        "data": {"train_batch_size": 2},
        "rollout": {"num_repeat": 2, "max_env_worker": 8},
    }
}


class PlayedHive:
    """A hive whose trainer, replica and model are played by methods. `http` is a client of the gateway's app."""

    def __init__(self, bus: Bus, gateway: Gateway, coordinator: Coordinator) -> None:
        self.name = ENGINE
        self.bus = bus
        self.gateway = gateway
        self.coordinator = coordinator
        self.app = create_app(gateway)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://hive.test:10086", timeout=30
        )
        self.epoch = 0

    def other(self, engine: str) -> "PlayedHive":
        """Return the same hive, with another of its engines to be started and played."""
        there = copy.copy(self)
        there.name = engine
        there.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url=f"http://hive.test:10086/e/{engine}", timeout=30
        )
        return there

    @property
    def engine(self) -> EngineState:
        return self.gateway.follower.hive.engine(self.name)

    async def phase(self, phase: Phase) -> None:
        await self.gateway.follower.wait_for(lambda _: self.engine.phase == phase, PATIENCE_S)

    async def send(self, message: inbox.Message) -> None:
        await self.bus.inbox.send(message)

    async def until_received(self, holds: Callable[[inbox.AnyMessage], bool]) -> None:
        """Wait until the inbox has had such a message."""
        async with asyncio.timeout(PATIENCE_S), Reader(self.bus, self.bus.subjects.inbox_stream, start_seq=1) as reader:
            while not any(holds(inbox.decode_message(stored.data)) for stored in await reader.read()):
                pass

    # ---- the trainer and the replica ----

    async def boot(self) -> None:
        """Open the run, and report the loaded model as ready and served."""
        run = self.engine.run
        answer = await self.bus.inbox.request(
            inbox.TrainerOpens(id=_id(), engine=self.name, run=run, trainer="trainer-1")
        )
        assert isinstance(answer, inbox.Done)
        self.epoch = answer.epoch
        await self.weights(0)

    async def weights(self, step: int) -> None:
        run = self.engine.run
        await self.send(
            inbox.WeightsSaved(
                id=_id(),
                engine=self.name,
                run=run,
                step=step,
                trainer_epoch=self.epoch,
                weights=Weights(where=f"/run-{run}/version-{step}"),
            )
        )
        await self.send(
            inbox.ReplicaAlive(id=_id(), engine=self.name, replica=REPLICA, url="http://nowhere", run=run, version=step)
        )

    async def train(self) -> None:
        """Report the step of the sealed batch as done."""
        batch = self.engine.batch
        assert batch is not None
        await self.send(
            inbox.StepDone(
                id=_id(),
                engine=self.name,
                run=batch.run,
                step=batch.step,
                trainer_epoch=self.epoch,
                checkpoint="nowhere",
                checkpoint_digest="0",
            )
        )
        await self.weights(batch.step)

    async def call(
        self, episode: str, messages: tuple[dict[str, Any], ...], answer: str, parent: CallRef | None = None
    ) -> CallRef:
        """Record a model call of an episode as the gateway does. The episode may be named by the id of its claim."""
        episode = without_secret(episode)
        record = CallRecord(
            id=_id(),
            engine=self.name,
            run=self.engine.run,
            episode=episode,
            parent=parent,
            prompt_tail=pack_tokens([1, 2]),
            prompt_tokens=2,
            choices=(
                Choice(
                    tokens=pack_tokens([3]),
                    logprobs=pack_logprobs([-0.5]),
                    message={"role": "assistant", "content": answer},
                ),
            ),
            sampling=SamplingParams(max_tokens=8),
            messages=messages,
        )
        body = encode_record(record)
        ack = await self.bus.publisher.publish(self.bus.subjects.call(self.name, ""), body, msg_id=record.id)
        ref = CallRef(ack.seq, record.id, digest(body))
        noted = NotedCall(episode, ref, 2, 1, self.engine.version, self.engine.version, CallStatus.COMPLETE)
        await self.send(inbox.CallRecorded(id=record.id, engine=self.name, run=self.engine.run, call=noted))
        await self.gateway.follower.wait_for(
            lambda _: any(call.ref.id == ref.id for one in self.engine.open.values() for call in one.calls), 10
        )
        return ref

    # ---- clients ----

    async def post(self, path: str, body: object = None, **headers: str) -> httpx.Response:
        return await self.http.post(path, json={} if body is None else body, headers=headers)

    async def start(self, job: dict[str, Any] | None = None) -> None:
        """Configure, start and boot the engine, until it is ROLLING."""
        synced = await self.post("/sync_train_config", {"yaml_as_string": json.dumps(job or JOB)})
        assert synced.status_code == 200, synced.text
        # Not by the route, which holds its answer for 0.6 s.
        started = await self.bus.inbox.request(inbox.Start(id=_id(), engine=self.name), 10)
        await self.gateway.follower.wait_position(started.position)
        await self.boot()
        await self.phase(Phase.ROLLING)

    async def claim(self, client: str = "c1", **more: object) -> dict[str, Any]:
        body = {"client_uuid": client, "episode_type": "train", "discard_episode_timeout": 60.0, **more}
        claim: dict[str, Any] = (await self.post("/claim_episode", body)).json()
        return claim

    async def end(self, episode: str, reward: object, task: str = "t1", client: str = "c1") -> httpx.Response:
        output = {"reward": reward, "is_success": True, "metadata": {"task_id": task}, "log_metrics": {}}
        body = {"client_uuid": client, "episode_uuid": episode, "task_id": task, "workflow_output": output}
        return await self.post("/end_episode", body)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve the app with a real HTTP server; give its URL."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            async with http_server(self.app, listener, drain_s=5.0):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _id() -> str:
    return uuid.uuid4().hex


@asynccontextmanager
async def played_hive(bus: Bus, **settings: Any) -> AsyncIterator[PlayedHive]:
    """Run a hive while the block runs, and audit its log after it."""
    coordinator = Coordinator(bus)
    follower = Follower(bus)
    gateway = Gateway(
        settings=GatewaySettings(hive=bus.subjects.hive, claim_wait_s=0.2, **settings),
        bus=bus,
        follower=follower,
        keys=Keys(b"a secret for tests of 32 bytes!!"),
    )
    gateway.ready = True
    running = [
        asyncio.create_task(coordinator.lead()),
        asyncio.create_task(follower.run()),
        asyncio.create_task(gateway.heartbeats.run()),
    ]
    hive = PlayedHive(bus, gateway, coordinator)
    try:
        await asyncio.wait_for(coordinator.leading.wait(), PATIENCE_S)
        yield hive
        report = await audited(BusSource(bus, "the log of this test"))
        assert not report.differences
    finally:
        await hive.http.aclose()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
