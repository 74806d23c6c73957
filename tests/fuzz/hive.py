"""The hive of a run: real processes, what they are like, and honest clients that train a step on it."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from bombus import Task, WorkflowOutput
from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.demo.hive import running
from bombus.errors import BombusError, Refused
from bombus.hive import inbox
from bombus.hive.generation import replica_key
from bombus.hive.state import EngineState, Phase
from bombus.hive.subjects import SIGNING_SECRET
from bombus.logs import INDENT
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import SwarmError
from tests.chaos.killer import kind_of
from tests.fuzz.corpus import CLIENT, JOB
from tests.fuzz.sockets import Address

ENGINE = "main"
HIVE = "main"
ROLLING_S = 300.0  # much of it for libraries to be imported
STEP_S = 150.0
LINES_SHOWN = 16  # of an entry of the log
WORD_S = 10.0  # for the coordinator to answer
RSS_MIB_MAX = 700  # that a process may grow; a gateway keeps conversations of up to 512 MiB
SERVICES = ("coordinator", "gateway", "inference", "nats-server", "trainer")
_BROKEN = re.compile(r"^\S+ \S* +(error|critical): |Traceback \(most|; restarting it")


@dataclass
class Held:
    """Episodes of one worker, by their claimed ids and the keys of their agents."""

    episode: str = ""
    key: str = ""
    other: str = ""
    other_key: str = ""
    evaluated: str = ""
    eval_key: str = ""
    ended: str = "e-0.x"
    ended_key: str = "sk-bombus-none"


class FuzzedHive:
    """A running hive. `log` has what its processes say."""

    def __init__(self, url: str, folder: Path, bus: Bus, follower: Follower, secret: bytes) -> None:
        self.url = url
        self.replica_key = replica_key(secret).encode()
        self.bus = bus
        self.follower = follower
        self.log = folder / "hive.log"
        self.gateway = _address(url)
        self.claimed: dict[str, set[str]] = {}  # ids that were handed out, by their client
        self._http = httpx.AsyncClient(base_url=url, timeout=30)
        self._supervisor = next(each for each in psutil.Process().children() if kind_of(each) == "up")
        self._read = 0  # bytes of the log that were looked at
        self.processes: dict[int, str] = {}

    @property
    def state(self) -> EngineState:
        return self.follower.hive.engine(ENGINE)

    @property
    def settled(self) -> tuple[int, int] | None:
        """Return the run and version while the engine rolls for episodes and its replica serves it, else None."""
        state = self.state
        rolls = state.phase == Phase.ROLLING and state.plays_episodes and not state.queues_groups
        ready = rolls and state.weights is not None and bool(state.loaded)
        return (state.run, state.weights.version) if ready and state.weights is not None else None

    @property
    def replica(self) -> Address:
        return _address(next(iter(self.state.replicas.values())).url)

    async def close(self) -> None:
        await self._http.aclose()

    # ---- the engine and its clients ----

    async def roll(self) -> None:
        """Give the engine its job, start it where it is not running it, and wait until it hands out episodes."""
        async with asyncio.timeout(ROLLING_S), AsyncSwarmClient(self.url, verbose=False) as client:
            while self.settled is None:
                if self.state.phase == Phase.ROLLING and (self.state.serves_operations or self.state.queues_groups):
                    await self.stop_engine()  # a case has begun it
                elif self.state.phase == Phase.OFFLINE:
                    await client.auto_sync_train_config_and_start_engine(json.dumps(JOB), force_restart=True)
                await asyncio.sleep(0.1)

    async def stop_engine(self) -> None:
        """Stop the engine, which ends all of its episodes."""
        (await self._http.post("/stop_engine")).raise_for_status()

    async def refill(self, held: Held) -> None:
        """Claim anew what a worker has no longer."""
        is_open = self.state.open
        if held.episode.partition(".")[0] not in is_open:
            held.ended, held.ended_key = held.episode or held.ended, held.key or held.ended_key
            held.episode, held.key = await self._claim("train", held.episode, held.key)
        if held.other.partition(".")[0] not in is_open:
            held.other, held.other_key = await self._claim("train", held.other, held.other_key)
        if held.evaluated.partition(".")[0] not in is_open:
            held.evaluated, held.eval_key = await self._claim("eval", held.evaluated, held.eval_key)

    async def _claim(self, kind: str, before: str, key: str) -> tuple[str, str]:
        body = {"client_uuid": CLIENT, "episode_type": kind, "discard_episode_timeout": 60.0}
        answer = (await self._http.post("/claim_episode", json=body)).json()
        return (answer["episode_uuid"], answer["openai_api_key"]) if answer.get("success") else (before, key)

    async def give_up(self, *held: Held) -> None:
        """Abort the episodes of `held`, and all that a client of ours got otherwise, whatever it called itself."""
        claimed, self.claimed = self.claimed, {}
        claimed.setdefault(CLIENT, set()).update(
            episode for each in held for episode in (each.episode, each.other, each.evaluated)
        )
        given_up = [
            self._http.post("/abort_episode", json={"client_uuid": client, "episode_uuid": episode})
            for client, episodes in claimed.items()
            for episode in episodes
        ]
        await asyncio.gather(*given_up)

    async def train_a_step(self, seed: int) -> float:
        """Let honest clients train a step. Return how long it took. Raises `TimeoutError`."""
        began = asyncio.get_running_loop().time()
        pick = random.Random(seed)
        async with asyncio.timeout(STEP_S), AsyncSwarmClient(self.url, verbose=False) as client:
            before = await client.get_global_step()
            while await client.get_global_step() == before:
                await asyncio.gather(*(self._play(client, f"honest-{each % 2}", pick.random()) for each in range(4)))
        return asyncio.get_running_loop().time() - began

    async def _play(self, client: AsyncSwarmClient, task: str, reward: float) -> None:
        try:
            _, credentials = await client.begin_episode(60.0, max_wait_s=20.0)
        except SwarmError:
            await asyncio.sleep(0.1)  # a step is being made
            return
        body = {"model": "any", "messages": [{"role": "user", "content": f"{task}="}], "max_tokens": 4}
        answer = await self._http.post(
            f"{credentials.base_url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {credentials.api_key}"},
        )
        if answer.status_code == 200:
            call = answer.json()["id"].removeprefix("chatcmpl-")
            output = WorkflowOutput(reward={call: reward} if task.endswith("1") else reward)
            await client.end_episode(Task(task_id=task, main_query=""), credentials.episode_uuid, output)

    # ---- its health ----

    def look(self) -> list[str]:
        """Return what is wrong since the last look: processes that are others now, lines that tell of a fault."""
        wrong = []
        now = self._children()
        if self.processes and now != self.processes:
            wrong.append(f"processes were {sorted(self.processes.items())}, and are {sorted(now.items())}")
        self.processes = now
        with self.log.open("rb") as log:
            log.seek(self._read)
            text = log.read().decode(errors="replace")
            self._read = log.tell()
        broken = next(iter(_broken(text.splitlines())), None)
        return wrong if broken is None else [*wrong, f"the log says:\n{broken}"]

    def rss(self) -> Counter[str]:
        """Return the memory of each service in MiB."""
        found: Counter[str] = Counter()
        for pid, kind in self.processes.items():
            found[kind] += psutil.Process(pid).memory_info().rss >> 20
        return found

    async def deaf(self) -> list[str]:
        """Return what is wrong with how the coordinator answers a command."""
        message = inbox.Lookup(id=f"fuzz-{random.getrandbits(60):x}", engine=ENGINE, episode="none")
        try:
            await self.bus.inbox.request(message, WORD_S)
        except Refused:
            pass  # an answer like any other
        except BombusError as error:
            return [f"the coordinator does not answer: {error}"]
        return []

    def _children(self) -> dict[int, str]:
        found = {child.pid: kind_of(child) for child in self._supervisor.children()}
        return {pid: kind for pid, kind in found.items() if kind in SERVICES}


def _broken(lines: Sequence[str]) -> Iterator[str]:
    """Yield the entries of a log that tell of a fault, each with the end of its traceback."""
    for number, line in enumerate(lines):
        if _BROKEN.search(line):
            entry = [line, *takewhile(lambda each: each.startswith(INDENT), lines[number + 1 :])]
            yield "\n".join(entry if len(entry) < LINES_SHOWN else [line, "    ...", *entry[-LINES_SHOWN:]])


@asynccontextmanager
async def fuzzed_hive(folder: Path) -> AsyncIterator[FuzzedHive]:
    """Start a hive whose engine rolls. Afterwards none of its processes is left."""
    async with running(folder, threads=1) as url:
        nats = (folder / "hive/nats-url").read_text().strip()
        async with await Bus.connect(nats, HIVE, name="fuzz") as bus:
            follower = Follower(bus)
            following = asyncio.create_task(follower.run())
            await follower.caught_up()
            hive = FuzzedHive(url, folder, bus, follower, await bus.secret(SIGNING_SECRET))
            try:
                await hive.roll()
                hive.look()
                yield hive
            finally:
                await hive.close()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


def _address(url: str) -> Address:
    found = urlsplit(url)
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port


def written(address: Address) -> str:
    """Return an address as `host` has it."""
    host, port = address
    return f"{host}:{port}"
