"""One run: a hive, wrong requests and messages, and what it is like afterwards."""

import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from fastapi.routing import iter_route_contexts

from bombus.bus import Bus
from bombus.bus.follow import Follower
from bombus.commands.audit import audited
from bombus.errors import BombusError
from bombus.replay.source import BusSource
from bombus_gateway.app import GatewayApp, create_app
from bombus_gateway.context import Gateway
from bombus_gateway.keys import Keys
from bombus_gateway.settings import GatewaySettings
from tests.fuzz import messages
from tests.fuzz.hive import RSS_MIB_MAX, FuzzedHive, Held, fuzzed_hive, written
from tests.fuzz.judging import wrong_with
from tests.fuzz.requests import HttpCase, Route, Server, http_case, slow_sender
from tests.fuzz.sockets import Address, Ended, Received, answers_in, exchange

WORKERS = 6
BLOCK = 240  # cases between two looks at the hive
LOOK_S = 2.0  # between two looks while cases run
RESTLESS = 5  # one block in so many begins with an engine that is stopped
BUS_SHARE = 6  # one case in so many is a message on the bus
BAD_MAX = 12
SHOWN = 1500

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bad:
    """Something that must not be. `cases` are those that may have done it."""

    cases: str
    what: str


@dataclass
class FuzzOutcome:
    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)
    decoded: str = ""
    step_s: float = 0.0
    rss: str = ""


def routes_of(bus: Bus) -> list[Route]:
    """Return (method, path) of everything that the real application answers."""
    gateway = Gateway(GatewaySettings(), bus, Follower(bus), Keys(bytes(32)))
    return app_routes(create_app(gateway))


def app_routes(app: GatewayApp) -> list[Route]:
    found = {(method, route.path or "") for route in iter_route_contexts(app.routes) for method in route.methods or ()}
    found |= {("GET" if path.endswith("/models") else "POST", path) for path in app.hot}
    found |= {("GET", f"{prefix}x") for prefix, _ in app.below}
    return sorted(found)


async def fuzz(folder: Path, seed: int, seconds: float, say: Say, only: Sequence[int] = ()) -> FuzzOutcome:
    """Run for `seconds`, or with `only` these cases once, and let the hive train a step."""
    outcome = FuzzOutcome()
    async with fuzzed_hive(folder) as hive:
        say(f"a hive at {hive.url}; seed {seed}")
        decoding = None if only else await _decode(seed, seconds, folder)
        runner = _Runner(hive, seed, outcome, say)
        try:
            if only:
                await runner.block(only)
            else:
                await runner.run(time.monotonic() + seconds)
            await runner.settle()
            if decoding is not None and not runner.broken:
                await _decoded(decoding, outcome)
        finally:
            if decoding is not None and decoding.returncode is None:
                decoding.kill()
                await decoding.wait()
    return outcome


def _is_restless(number: int) -> bool:
    """Whether a case belongs to a block in which the engine is stopped."""
    return number // BLOCK % RESTLESS == RESTLESS - 1


class _Runner:
    def __init__(self, hive: FuzzedHive, seed: int, outcome: FuzzOutcome, say: Say) -> None:
        self._hive = hive
        self._seed = seed
        self._outcome = outcome
        self._say = say
        self._routes = routes_of(hive.bus)
        self._held = [Held() for _ in range(WORKERS)]
        self._rss: Counter[str] = Counter()
        self.broken = False

    async def run(self, until: float) -> None:
        slow = asyncio.create_task(self._send_slowly(until))
        try:
            await self._blocks(until)
        finally:
            slow.cancel()
            with suppress(asyncio.CancelledError):
                await slow

    async def _blocks(self, until: float) -> None:
        for first in itertools.count(0, BLOCK):
            if time.monotonic() > until or self.broken or len(self._outcome.bad) >= BAD_MAX:
                return
            await self.block(range(first, first + BLOCK), until)
            self._rss = self._rss or self._hive.rss()
            statuses = ", ".join(f"{status} x {count}" for status, count in sorted(self._outcome.statuses.items()))
            self._say(f"{self._outcome.cases} cases; {statuses}; {len(self._outcome.bad)} bad")

    async def block(self, numbers: Sequence[int], until: float = float("inf")) -> None:
        """Run some cases, several at once, then look at the hive."""
        restless = _is_restless(numbers[0])
        left = iter(numbers)
        cases = f"{numbers[0]}-{numbers[-1]}"
        watching = asyncio.create_task(self._watch(cases))
        try:
            await (self._hive.stop_engine() if restless else self._hive.roll())
            async with asyncio.TaskGroup() as workers:
                for held in self._held:
                    workers.create_task(self._work(left, held, until))
            if not self.broken:
                await self._hive.give_up()
                self._note(cases, await self._hive.deaf())
        except* (httpx.HTTPError, BombusError, TimeoutError) as group:
            self._break(cases, [f"what is no case failed: {group.exceptions!r}"])
        finally:
            watching.cancel()
        self._break(cases, self._hive.look())

    async def settle(self) -> None:
        """Let the hive train a step with honest clients, and compare its memory, unless something broke it."""
        if self.broken:
            return
        cases = f"0-{self._outcome.cases}"
        try:
            await self._hive.roll()
            await self._hive.give_up(*self._held)
            self._outcome.step_s = await self._hive.train_a_step(self._seed)
            self._say(f"honest clients trained a step in {self._outcome.step_s:.1f} s")
            report = await audited(BusSource(self._hive.bus, "the log"))
            self._note(cases, [f"the audit found that {found}" for found in report.differences])
        except TimeoutError:
            self._note(cases, [f"no step was trained afterwards; the engine is {self._hive.state.phase}"])
        self._note(cases, self._hive.look())
        with suppress(ProcessLookupError):
            now = self._hive.rss()
            self._outcome.rss = ", ".join(f"{kind} {self._rss[kind]} -> {now[kind]}" for kind in sorted(now))
            grown = [kind for kind in now if self._rss and now[kind] - self._rss[kind] > RSS_MIB_MAX]
            self._note(cases, [f"{kind} grew from {self._rss[kind]} to {now[kind]} MiB" for kind in grown])

    async def _watch(self, cases: str) -> None:
        while not self.broken:
            await asyncio.sleep(LOOK_S)
            self._break(cases, self._hive.look())

    async def _send_slowly(self, until: float) -> None:
        """Let one client after the other send slowly, as long as there is time for it."""
        for number in itertools.count():
            client = slow_sender(self._seed, number)
            if time.monotonic() + client.limit_s > until or self.broken:
                return
            address = self._address(client.api)
            chunks = [
                each.replace(b"@host@", written(address).encode()).replace(b"@replica_key@", self._hive.replica_key)
                if isinstance(each, bytes)
                else each
                for each in client.chunks
            ]
            received = await exchange(address, chunks, client.limit_s, reads=None)
            if received.ended == Ended.LEFT:
                self._note("slow", [f"slow sender {number} at the {client.api} is open after {client.limit_s:.0f} s"])

    def _address(self, api: Server) -> Address:
        return self._hive.gateway if api == Server.GATEWAY else self._hive.replica

    def _break(self, cases: str, found: Sequence[str]) -> None:
        """Note what ends a run: a hive with such a fault would only show what follows from it."""
        self.broken = self.broken or bool(found)
        self._note(cases, found)

    def _note(self, cases: str, found: Iterable[str]) -> None:
        for what in found:
            self._outcome.bad.append(Bad(cases, what))
            self._say(f"BAD cases {cases}: {what[:SHOWN]}")

    async def _work(self, left: Iterator[int], held: Held, until: float) -> None:
        for number in left:
            if time.monotonic() > until or self.broken or len(self._outcome.bad) >= BAD_MAX:
                return
            self._outcome.cases += 1
            if number % BUS_SHARE == 0:
                await messages.send(self._hive.bus, self._seed, number, self._hive.state.trainer_epoch)
                continue
            restless = _is_restless(number)
            if not restless:
                await self._hive.refill(held)
            avoided = "/start_engine" if restless else "/stop_engine"
            await self._http(http_case(self._seed, number, self._routes, avoided), held)

    async def _http(self, case: HttpCase, held: Held) -> None:
        fill = self._fill(held)
        address = self._address(case.api)
        before = self._hive.settled
        asked = [exchange(address, request.chunks(fill), case.within_s, case.reads) for request in case.requests]
        received = await asyncio.gather(*asked)
        settled = before is not None and before == self._hive.settled
        wrong = wrong_with(case, received, settled, fill)
        for each in received:
            self._remember(each)
        if wrong:
            sent = b"".join(chunk for chunk in case.requests[0].chunks(fill) if isinstance(chunk, bytes))
            self._note(str(case.number), [f"{case.label}: {wrong}\n  sent {len(sent)} bytes: {sent[:SHOWN]!r}"])

    def _fill(self, held: Held) -> Callable[[bytes], bytes]:
        names = {
            b"@episode@": held.episode, b"@other@": held.other, b"@key@": held.key, b"@other_key@": held.other_key,
            b"@eval_key@": held.eval_key, b"@ended_key@": held.ended_key, b"@job@": "",
            b"@host@": written(self._hive.gateway),
            b"@replica@": written(self._hive.replica), b"@replica_key@": self._hive.replica_key.decode(),
        }  # fmt: skip

        def fill(text: bytes) -> bytes:
            for name, value in names.items():
                text = text.replace(name, value.encode())
            return text

        return fill

    def _remember(self, received: Received) -> None:
        """Count an answer, and keep the episodes that it hands out."""
        try:
            answers = answers_in(received.body)
        except ValueError:
            return
        for answer in answers:
            self._outcome.statuses[answer.status] += 1
            if b"openai_api_key" not in answer.body:
                continue
            with suppress(ValueError):
                claim = json.loads(answer.body)
                for episode in [claim, *claim.get("episodes", [])]:
                    if episode.get("episode_uuid"):
                        self._hive.claimed.setdefault(claim["client_uuid"], set()).add(episode["episode_uuid"])


# ---- decoders, in a process of their own ---------------------------------------------------------------------------


async def _decode(seed: int, seconds: float, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fuzz.decoding", "--seed", str(seed), "--seconds", str(seconds),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder)},  # also when it is killed, it leaves nothing elsewhere
    )  # fmt: skip


async def _decoded(process: asyncio.subprocess.Process, outcome: FuzzOutcome) -> None:
    try:
        async with asyncio.timeout(180):
            output, _ = await process.communicate()
    except TimeoutError:
        outcome.bad.append(Bad("decoding", "the decoders did not end"))
        return
    lines = output.decode(errors="replace").splitlines()
    outcome.decoded = lines[-1] if lines else ""
    outcome.bad += [Bad("decoding", line) for line in lines if line.startswith("BAD")]
    if process.returncode and not any(line.startswith("BAD") for line in lines):
        outcome.bad.append(Bad("decoding", f"the process ended with {process.returncode}: {lines[-5:]}"))
