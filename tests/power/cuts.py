"""A hive under load, whose power is cut again and again. Each cut leaves a copy of its store, for another server.

Agents, a gateway, a coordinator and a trainer work in this process, over one connection each. The ledger has what each
was told, as of the moment of a cut.
"""

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bombus.bus import Bus, EmbeddedServer, Reader, Stored
from bombus.bus.follow import Follower
from bombus.errors import BombusError
from bombus.hive import events as ev
from bombus.hive import inbox
from bombus.hive.records import CallRef, decode_record, digest
from bombus.hive.state import EngineState
from bombus.replay.source import BusSource
from bombus.replay.upkeep import check
from bombus_coordinator.shell import Coordinator, Housekeeping
from bombus_gateway.keys import Keys
from tests.conftest import SMALL_STREAMS
from tests.coordinator.test_shell import leading, log_of
from tests.gateway.openai_hive import ENGINE, JOB, MODEL, SECRET, GatewayHive, gateway_of, new_id
from tests.patience import PATIENCE_S, until, wait_until
from tests.power.disk import SLOW_S, Disk

AGENTS = 8
SYNCS_MAX = 6  # the most from one cut to the next
POWER_JOB: dict[str, Any] = {
    "bombus": {
        "model": JOB["bombus"]["model"],
        "rollout": {**JOB["bombus"]["rollout"], "num_repeat": 4},
        "collection": {"batch_size": 1, "max_staleness": 8},
    }
}


@dataclass
class Ledger:
    """What was acknowledged: to agents, and to services, which act on each event that they fold. `pending` are the
    commands that nobody has answered yet."""

    claims: dict[str, str] = field(default_factory=dict)  # the episode of each claim
    calls: dict[str, str] = field(default_factory=dict)  # the episode of each call
    ends: dict[str, inbox.End] = field(default_factory=dict)
    folded: dict[int, bytes] = field(default_factory=dict)
    pending: dict[str, inbox.Message] = field(default_factory=dict)

    def fold(self, position: int, event: ev.AnyEvent) -> None:
        self.folded[position] = digest(ev.encode_event(event))


@dataclass
class Outcome:
    """What cuts have shown: how much had been acknowledged, and each guarantee that was broken."""

    cuts: int = 0
    acknowledged: int = 0
    unanswered: int = 0
    inbox_behind: int = 0  # cuts after which events answer messages that the inbox has lost
    wrong: list[str] = field(default_factory=list)


class Load:
    """A hive whose server syncs to a `Disk`, and those who work with it, while `working` is set."""

    def __init__(self, server: EmbeddedServer, hive: GatewayHive, ledger: Ledger) -> None:
        self.server = server
        self.ledger = ledger
        self.working = asyncio.Event()
        self._hive = hive
        self._keys = Keys(SECRET)

    async def ask(self, message: inbox.Message) -> inbox.AnyAnswer | None:
        """Send a command; return None if it was refused."""
        self.ledger.pending[message.id] = message
        try:
            return await self._hive.bus.inbox.request(message, PATIENCE_S)
        except BombusError:
            return None
        finally:
            self.ledger.pending.pop(message.id, None)

    async def agent(self, number: int) -> None:
        while True:
            await self.working.wait()
            name = f"agent-{number}"
            message = inbox.Claim(id=new_id(), engine=ENGINE, claim=new_id(), client=name, wait_s=2.0)
            granted = await self.ask(message)
            if not isinstance(granted, inbox.Granted):
                continue
            (episode,) = granted.episodes
            self.ledger.claims[message.claim] = episode
            await self._hive.bus.inbox.send(inbox.Touch(id=new_id(), engine=ENGINE, confirmed=(message.claim,)))
            key = self._keys.sign(ENGINE, granted.run, episode, granted.claimed_ns + 3600 * 10**9)
            client = self._hive.client(key)
            for _ in range(2):
                said: list[Any] = [{"role": "user", "content": f"the weather in {new_id()}"}]
                answer = await client.chat.completions.create(model=MODEL, messages=said)
                self.ledger.calls[answer.id.removeprefix("chatcmpl-")] = episode
            await client.close()
            result = inbox.EpisodeResult(episode=episode, task="t", reward=float(number % 2))
            end = inbox.End(id=new_id(), engine=ENGINE, client=name, results=(result,))
            if await self.ask(end) is not None:
                self.ledger.ends[episode] = end

    async def trainer(self) -> None:
        """Report each sealed batch as trained, and its weights as served."""
        hive = self._hive
        while True:
            await hive.follower.wait_for(lambda _: hive.engine.batch is not None)
            batch = hive.engine.batch
            assert batch is not None
            said = {"engine": ENGINE, "run": batch.run, "step": batch.step, "trainer_epoch": hive.epoch}
            done = {"checkpoint": "nowhere", "checkpoint_digest": "0"}
            weights = ev.Weights(where="nowhere", tokenizer="tokenizer-1")
            await hive.bus.inbox.send(inbox.StepDone(id=new_id(), **said, **done))  # type: ignore[arg-type]
            await hive.bus.inbox.send(inbox.WeightsSaved(id=new_id(), **said, weights=weights))  # type: ignore[arg-type]
            await hive.until(partial(_has_version, batch.step))
            await hive.alive("replica-1", hive.replica, batch.step)

    def cut(self, disk: Disk, copy: Path) -> Ledger:
        """Write what a power cut at this moment leaves, and return what had been acknowledged until then."""
        promised = deepcopy(self.ledger)
        assert self.server.pid is not None
        tasks = Path(f"/proc/{self.server.pid}/task")
        with disk.lock:
            os.kill(self.server.pid, signal.SIGSTOP)
            try:
                wait_until(lambda: all("\nState:\tT" in (task / "status").read_text() for task in tasks.iterdir()))
                disk.cut(self.server.data_dir / "jetstream", copy / "jetstream")
            finally:
                os.kill(self.server.pid, signal.SIGCONT)
        return promised


@asynccontextmanager
async def load_on(folder: Path, disk: Disk) -> AsyncIterator[Load]:
    server = EmbeddedServer(folder, store_bytes_max=100 << 40, power=True, sync=disk.sync)
    await asyncio.to_thread(server.start)
    try:
        async with (
            await Bus.connect(server.url, "h", name="coordinator") as leads,
            await Bus.connect(server.url, "h", name="gateway") as serves,
            await Bus.connect(server.url, "h", name="agents") as bus,
        ):
            await bus.ensure_streams(SMALL_STREAMS)
            hive, ledger = GatewayHive(bus), Ledger()
            coordinator = Coordinator(leads, housekeeping=Housekeeping(trim_s=0.1))
            async with working(coordinator.lead(), hive.follower.run()):
                await asyncio.wait_for(coordinator.leading.wait(), PATIENCE_S)
                await hive.start(POWER_JOB)
                async with gateway_of(serves, late=Follower(serves, ledger.fold)) as (gateway, url):
                    await gateway.follower.caught_up(PATIENCE_S)
                    hive.base_url = url
                    load = Load(server, hive, ledger)
                    agents = map(load.agent, range(AGENTS))
                    async with working(load.trainer(), hive.keep_replicas(), *agents):
                        yield load
            await hive.replica.stop()
    finally:
        await asyncio.to_thread(server.stop, 2.0)


@asynccontextmanager
async def working(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do this while the block runs; end it with the first that fails."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        yield
        for task in running:
            task.cancel()


async def run(folder: Path, cuts: int, seed: int) -> Outcome:
    """Cut the power of a hive so many times, and look at what each cut has left."""
    disk, outcome = Disk(seed), Outcome()
    async with load_on(folder / "hive", disk) as load:
        for number in range(cuts):
            load.working.set()
            await until(partial(disk.has_synced, disk.syncs + disk.random.randint(1, SYNCS_MAX)))
            await asyncio.sleep(disk.random.random() * SLOW_S)
            copy = folder / f"cut-{number}"
            promised = load.cut(disk, copy)
            load.working.clear()
            outcome.cuts += 1
            outcome.acknowledged = len(promised.claims) + len(promised.calls) + len(promised.ends)
            outcome.unanswered += len(promised.pending)
            outcome.wrong += [f"cut {number}: {each}" for each in await _look(copy, promised, outcome)]
            if not outcome.wrong:
                await asyncio.to_thread(shutil.rmtree, copy)
    disk.close()
    return outcome


async def _look(copy: Path, promised: Ledger, outcome: Outcome) -> list[str]:
    """Open what a cut has left, let a coordinator go on with it, and return what is not as it was acknowledged."""
    server = EmbeddedServer(copy, store_bytes_max=100 << 40)
    try:
        await asyncio.to_thread(server.start)
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            calls, before = await _calls(bus), await log_of(bus)
            wrong = _lost_at_once(promised, calls, before)
            async with leading(bus):
                await _repeat(bus, promised, wrong)
            wrong += _audit(promised, calls, await log_of(bus), outcome)
            await check(BusSource(bus, "the log"))
            return wrong
    except BombusError as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        await asyncio.to_thread(server.stop, 2.0)


async def _calls(bus: Bus) -> list[Stored]:
    stream = bus.subjects.calls_stream
    found: list[Stored] = []
    last = (await bus.state(stream)).last_seq
    async with Reader(bus, stream) as reader:
        while last and (not found or found[-1].seq < last):
            found += await reader.read()
    return found


def _lost_at_once(promised: Ledger, calls: list[Stored], events: list[Stored]) -> list[str]:
    """Return what is missing, or contradicts another stream, before anything goes on."""
    on_log = {stored.seq: digest(stored.data) for stored in events}
    wrong = [
        f"event {seq}, on which a service acted, is {'another' if seq in on_log else 'gone'}"
        for seq, known in promised.folded.items()
        if on_log.get(seq) != known
    ]
    ids = Counter(decode_record(stored.data).id for stored in calls)
    wrong += [f"call {call} is stored {ids[call]} times" for call in promised.calls if ids[call] != 1]
    bodies = {stored.seq: stored.data for stored in calls}
    for ref in _noted(events):
        if ref.seq not in bodies or digest(bodies[ref.seq]) != ref.digest:
            wrong.append(f"call {ref.id} at {ref.seq} is noted, and not stored")
    return wrong


async def _repeat(bus: Bus, promised: Ledger, wrong: list[str]) -> None:
    """Send again what nobody has answered, and some of what was, as clients do that outlive the server."""
    for message in promised.pending.values():
        try:
            await bus.inbox.request(msgspec.structs.replace(message, wait_s=0.0) if _claims(message) else message)
        except BombusError:
            pass  # such as a claim that finds no room
    for episode, end in list(promised.ends.items())[-AGENTS:]:
        try:
            await bus.inbox.request(end)
        except BombusError as error:
            wrong.append(f"the end of {episode} was acknowledged, and is refused when it is sent again: {error}")
    for claim, episode in list(promised.claims.items())[-AGENTS:]:
        if episode in promised.ends:
            continue
        lookup = inbox.Lookup(id=new_id(), engine=ENGINE, episode=episode)
        try:
            await bus.inbox.request(lookup)
        except BombusError as error:
            if any(episode == result.episode for each in promised.pending.values() for result in _results(each)):
                continue  # its end, which nobody had answered, counts
            wrong.append(f"episode {episode} of claim {claim} is not open: {error}")


def _has_version(version: int, engine: EngineState) -> bool:
    return engine.version == version


def _claims(message: inbox.Message) -> bool:
    return isinstance(message, inbox.Claim)


def _results(message: inbox.Message) -> tuple[inbox.EpisodeResult, ...]:
    return message.results if isinstance(message, inbox.End) else ()


def _noted(events: list[Stored]) -> list[CallRef]:
    decoded = map(ev.decode_event, (stored.data for stored in events))
    return [call.ref for event in decoded if isinstance(event, ev.CallsNoted) for call in event.calls]


def _audit(promised: Ledger, calls: list[Stored], events: list[Stored], outcome: Outcome) -> list[str]:
    """Return what is not on the log, or more than once, after all that the inbox had was decided."""
    noted, claimed, ended, steps = Counter[str](), Counter[str](), Counter[str](), Counter[int]()
    rewards: dict[str, float | None] = {}
    wrong: list[str] = []
    for event in map(ev.decode_event, (stored.data for stored in events)):
        if isinstance(event, ev.CallsNoted):
            noted.update(call.ref.id for call in event.calls)
            wrong += [f"call {call.ref.id} is late" for call in event.calls if call.late]
        elif isinstance(event, ev.EpisodeClaimed):
            claimed[event.claim] += 1
        elif isinstance(event, ev.EpisodeEnded):
            ended.update(each.episode for each in event.outcomes)
            rewards |= {each.episode: each.reward for each in event.outcomes}
        elif isinstance(event, ev.StepCompleted):
            steps[event.step] += 1
        elif isinstance(event, ev.StreamWentBack):
            if event.what == "inbox":
                outcome.inbox_behind += 1
            else:
                wrong.append(f"{event.what} has lost messages {event.kept + 1} to {event.known}")
    wrong += [f"call {call} is noted {noted[call]} times" for call in promised.calls if noted[call] != 1]
    wrong += [f"claim {claim} is granted {claimed[claim]} times" for claim in promised.claims if claimed[claim] != 1]
    wrong += [f"episode {each} is ended {ended[each]} times" for each in promised.ends if ended[each] != 1]
    wrong += [
        f"episode {episode} has reward {rewards.get(episode)}"
        for episode, end in promised.ends.items()
        if rewards.get(episode) != end.results[0].reward
    ]
    for what, counted in (("call", noted), ("claim", claimed), ("episode", ended), ("step", steps)):
        wrong += [f"{what} {name} is on the log {count} times" for name, count in counted.items() if count > 1]
    return wrong
