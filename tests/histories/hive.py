"""A real hive for histories: NATS, coordinator, two gateways, and a replica with the scripted model."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.hive import inbox
from bombus.hive.events import NotedCall
from bombus.hive.records import CallRecord, decode_record
from bombus_coordinator.shell import Coordinator
from bombus_gateway.app import GatewayApp, create_app
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings
from tests.gateway.openai_hive import ENGINE, SECRET, GatewayHive, new_id
from tests.histories.engine import Engine
from tests.histories.model import CONTEXT, FILES, NAME
from tests.patience import PATIENCE_S

GATEWAYS = 2
NOTED_S_MAX = 30.0
JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": NAME},
        "rollout": {
            "max_env_worker": 1024,
            "max_prompt_length": CONTEXT // 2,
            "max_response_length": CONTEXT // 2,
            "max_response_length_in_one_turn": 4096,
            "max_model_len": CONTEXT,
        },
    }
}


@dataclass
class Arena:
    """What histories are played against. `apis` are the gateways' applications."""

    hive: GatewayHive
    engine: Engine
    apis: Sequence[GatewayApp]

    async def records(self, episode: str, count: int) -> list[CallRecord]:
        """Return the calls of an episode, once so many are noted. Raises `TimeoutError`."""
        follower, subjects = self.hive.follower, self.hive.bus.subjects

        def noted() -> Sequence[NotedCall]:
            found = follower.hive.engine(ENGINE).open.get(episode)
            return found.calls if found is not None else ()

        await follower.wait_for(lambda _: len(noted()) >= count, NOTED_S_MAX)
        refs = [call.ref for call in noted()]
        stored = await self.hive.bus.get_many(subjects.calls_stream, [ref.seq for ref in refs])
        return [decode_record(found.data, ref) for found, ref in zip(stored, refs, strict=True)]

    async def abort(self, episode: str) -> None:
        """End an episode without a result, so that no batch is ever complete."""
        await self.hive.bus.inbox.request(inbox.Abort(id=new_id(), engine=ENGINE, client="c1", episodes=(episode,)))


class Reply:
    """What a gateway has answered. `hang_up` closes the connection once the first bytes of the body are here."""

    def __init__(self, hang_up: bool = False) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self._hang_up = hang_up
        self._gone = asyncio.Event()

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")
            if self._hang_up:
                self._gone.set()

    async def disconnect(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}


async def post(app: GatewayApp, path: str, headers: Mapping[bytes, bytes], body: bytes, hang_up: bool = False) -> Reply:
    """Send a request to a gateway's application, as its server would."""
    reply = Reply(hang_up)
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Mapping[str, Any]:
        return next(messages, None) or await reply.disconnect()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-length", str(len(body)).encode()), *headers.items()],
    }
    await app(scope, receive, reply.send)  # type: ignore[arg-type]
    return reply


@asynccontextmanager
async def arena_of(bus: Bus) -> AsyncIterator[Arena]:
    """Run a hive of one engine while the block runs."""
    hive, engine = GatewayHive(bus), Engine()
    hive.replica.otherwise = engine.sample
    coordinator = Coordinator(bus)
    running = [asyncio.create_task(coordinator.lead()), asyncio.create_task(hive.follower.run())]
    try:
        await asyncio.wait_for(coordinator.leading.wait(), PATIENCE_S)
        await hive.start(JOB, FILES)
        running.append(asyncio.create_task(hive.keep_replicas()))
        apis: list[GatewayApp] = []
        for _ in range(GATEWAYS):
            follower = Follower(bus)
            settings = GatewaySettings(hive=bus.subjects.hive)
            gateway = Gateway(settings=settings, bus=bus, follower=follower, keys=Keys(SECRET))
            apis.append(create_app(gateway))
            running.append(asyncio.create_task(follower.run()))
            running.append(asyncio.create_task(gateway.heartbeats.run()))
            await follower.caught_up(10)
            gateway.ready = True
        yield Arena(hive, engine, apis)
        for api in apis:
            api.calls.client.close()
            api.calls.workers.close()
    finally:
        await hive.replica.stop()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
