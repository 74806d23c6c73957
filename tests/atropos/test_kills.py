"""Environments push and a trainer polls, while the processes of their server are killed."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.atropos.run_api import TRAINER, RunApi, run_api
from tests.effort import effort, long_only
from tests.patience import PATIENCE_S, until

KINDS = ("gateway", "coordinator", "nats-server")
ROUNDS = effort(1, 4)  # in which each of them is killed once
PUSHES = 30  # that are acknowledged between two kills
ENVIRONMENTS = 4
BATCH = 8
AGAIN_S = 0.05  # after a request that has failed
REGISTRATION = {"max_token_length": 64, "desired_name": "a", "weight": 1.0, "group_size": 2}


class Load:
    """Environments and a trainer that send each request until it is answered."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.acknowledged: set[int] = set()
        self.batches: list[tuple[int, ...]] = []
        self.repeated = 0
        self.failed: Counter[str] = Counter()
        self.is_pushing = True
        self._numbers: Iterator[int] = itertools.count(1)
        self._handed: set[tuple[int, ...]] = set()

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request on a connection of its own, as Atropos's clients do, until it is answered."""
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                try:
                    async with httpx.AsyncClient(base_url=self.url, timeout=10) as http:
                        answer = await http.request(method, path, json=body)
                    if answer.status_code == 200:
                        return answer.json()
                    assert answer.status_code >= 500, answer.text
                    self.failed[f"{path} {answer.status_code}"] += 1
                except httpx.TransportError as error:
                    self.failed[f"{path} {type(error).__name__}"] += 1
                await asyncio.sleep(AGAIN_S)

    async def push(self, environment: int | None) -> None:
        number = next(self._numbers)
        rows = [[number, 1, 2], [number, 3]]
        group = {"tokens": rows, "masks": rows, "scores": [1.0, 0.0], "env_id": environment}
        assert (await self.ask("POST", "/scored_data", group)) == {"status": "received"}
        self.acknowledged.add(number)

    async def environment(self) -> None:
        joined = await self.ask("POST", "/register-env", REGISTRATION)
        while self.is_pushing:
            await self.push(joined["env_id"])

    async def poll(self) -> bool:
        """Take a batch. Returns whether there was one."""
        batch = (await self.ask("GET", "/batch"))["batch"]
        if batch is None:
            return False
        numbers = tuple(group["tokens"][0][0] for group in batch)
        self.repeated += numbers in self._handed
        self._handed.add(numbers)
        self.batches.append(numbers)
        return True

    async def go_on(self, pushes: int) -> None:
        """Wait until so many more were acknowledged."""
        enough = len(self.acknowledged) + pushes
        await until(lambda: len(self.acknowledged) >= enough)

    async def trainer(self) -> None:
        while self.is_pushing:
            await self.poll()


async def strike(server: RunApi, kind: str) -> bool:
    """Kill a process of this kind, once there is one. Returns whether it has not just ended by itself."""
    await until(lambda: server.services(kind))
    with contextlib.suppress(psutil.NoSuchProcess):  # for want of another that was killed
        server.services(kind)[0].kill()
        return True
    return False


@long_only
async def test_r16_every_acknowledged_group_is_served_whatever_is_killed_under_load(tmp_path: Path) -> None:
    with run_api(tmp_path, "--gateways", "2") as server:
        load = Load(server.url)
        await load.ask("POST", "/register", TRAINER | {"batch_size": BATCH})
        assert not await load.poll()
        killed = 0
        async with asyncio.TaskGroup() as tasks:
            for _ in range(ENVIRONMENTS):
                tasks.create_task(load.environment())
            tasks.create_task(load.trainer())
            for kind in KINDS * ROUNDS:
                await load.go_on(PUSHES)
                killed += await strike(server, kind)
            await load.go_on(PUSHES)
            load.is_pushing = False
        while (await load.ask("GET", "/status"))["queue_size"] % (BATCH // 2):
            await load.push(None)  # so that all of them make up batches
        while await load.poll():
            pass
        step = (await load.ask("GET", "/status"))["current_step"]
    served = set(itertools.chain.from_iterable(load.batches))
    print(f"{len(load.acknowledged)} groups acknowledged, {len(load.batches)} batches, {load.repeated} of them again")
    print(dict(load.failed))
    assert load.acknowledged <= served
    assert step == len(set(load.batches)), "each batch is one step, however often it was handed out"
    in_batches = Counter(itertools.chain.from_iterable(set(load.batches)))
    assert max(in_batches.values()) == 1, "no group is in two batches"
    assert killed > len(KINDS) / 2, "nothing was killed in time"
