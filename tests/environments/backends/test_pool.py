"""Pools of backends that are real processes: bound, scrubbed, replaced, and none left behind."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from bombus.environments.backends.kinds import Backend
from bombus.environments.backends.pool import START_TRIES, BackendPool
from bombus.environments.backends.process import SimulatorProcess
from bombus.environments.kinds import EnvironmentLost, EnvironmentsBusy
from bombus.environments.serving.server import HANDSHAKE_S
from bombus.machine.process import free_port
from tests.patience import PATIENCE_S, until

PROGRAM = Path(__file__).parent.parent / "serving/programs/simulator.py"


def simulator(number: int, base_port: int = 0) -> SimulatorProcess:
    return SimulatorProcess(
        [sys.executable, str(PROGRAM)],
        health="/health",
        reset="/reset",
        port=base_port + number if base_port else 0,
        port_variable="GATEWAY_PORT",
    )


async def put(backend: Backend, text: str, path: str = "/bucket") -> None:
    async with httpx.AsyncClient(base_url=backend.address) as http:
        await http.post(path, content=text)


async def kept(backend: Backend) -> str:
    async with httpx.AsyncClient(base_url=backend.address) as http:
        return (await http.get("/bucket")).text


async def test_p3_a_backend_is_bound_to_one_session_and_scrubbed_when_it_is_given_back() -> None:
    async with BackendPool(simulator, 2) as pool:
        one, other = await pool.take("a"), await pool.take("b")
        assert one is not other
        assert await pool.take("a") is one, "it stays bound"
        await put(one, "of a")
        await put(other, "of b")
        assert (await kept(one), await kept(other)) == ("of a", "of b"), "the same name, and no cross-talk"
        await pool.give_back("a")
        await pool.give_back("a")
        assert pool.counts() == {"ready": 1, "bound": 1, "replacing": 0}, "giving back is idempotent"
        assert await pool.take("c") is one
        assert await kept(one) == ""


async def test_p2_a_pool_that_is_exhausted_says_so() -> None:
    async with BackendPool(simulator, 1, spares=1, kind="MiniStack") as pool:
        await pool.take("a")
        with pytest.raises(EnvironmentsBusy, match="MiniStack pool exhausted: all 1 are in use"):
            await pool.take("b")


async def test_a_backend_that_was_killed_is_replaced_and_a_spare_takes_its_place() -> None:
    async with BackendPool(simulator, 1, spares=1) as pool:
        first = await pool.take("a")
        assert isinstance(first, SimulatorProcess)
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: first.pid is None or not psutil.pid_exists(first.pid))
        assert not await first.is_healthy()
        await pool.give_back("a")
        second = await pool.take("b")
        assert second is not first
        await put(second, "of b")
        await until(lambda: pool.counts()["ready"] == 1)


async def test_a_backend_that_is_frozen_while_it_is_free_is_replaced_within_a_handshake() -> None:
    async with BackendPool(simulator, 1, spares=1) as pool:
        backends = {}
        for session in ("a", "b"):
            backends[session] = await pool.take(session)
            await pool.give_back(session)
        frozen = backends["a"]
        assert isinstance(frozen, SimulatorProcess)
        assert frozen.pid is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        async with asyncio.timeout(HANDSHAKE_S - 1):
            assert await pool.take("c") is backends["b"]


async def test_p3_a_backend_whose_scrub_is_cancelled_is_replaced() -> None:
    class Clinging(Odd):
        async def scrub(self) -> None:
            await asyncio.Event().wait()

    made: list[Odd] = []

    def make(number: int) -> Odd:
        made.append(Odd() if made else Clinging())
        return made[-1]

    async with BackendPool(make, 1) as pool:
        await pool.take("a")
        giving_back = asyncio.create_task(pool.give_back("a"))
        await until(lambda: pool.counts()["bound"] == 0)
        giving_back.cancel()
        await asyncio.wait({giving_back})
        assert await pool.take("b") is made[1]


async def test_p3_a_backend_that_cannot_be_scrubbed_is_released_all_the_same_and_replaced() -> None:
    async with BackendPool(simulator, 1) as pool:
        first = await pool.take("a")
        await put(first, "", "/break")
        with pytest.raises(EnvironmentLost, match="could not be reset"):
            await pool.renew("a")
        await pool.give_back("a")
        second = await pool.take("b")
        assert second is not first
        assert await kept(second) == ""


async def test_a_backend_whose_scrub_has_failed_is_not_scrubbed_again_when_it_is_given_back() -> None:
    class Counting(Odd):
        scrubs = 0

        async def scrub(self) -> None:
            self.scrubs += 1
            await super().scrub()

    made: list[Counting] = []

    def make(number: int) -> Counting:
        made.append(Counting() if made else Counting(scrub=TimeoutError()))
        return made[-1]

    async with BackendPool(make, 1) as pool:
        await pool.take("a")
        with pytest.raises(EnvironmentLost, match="backend 0 could not be scrubbed"):
            await pool.renew("a")
        await pool.give_back("a")
        assert await pool.take("a") is made[1]
        await pool.give_back("a")
        assert [one.scrubs for one in made] == [1, 1]


async def test_a_backend_that_a_session_may_still_use_is_replaced_and_not_scrubbed() -> None:
    async with BackendPool(simulator, 1) as pool:
        first = await pool.take("a")
        assert isinstance(first, SimulatorProcess)
        await pool.give_back("a", in_use=True)
        second = await pool.take("b")
        assert second is not first
        assert first.pid is None, "what the session left running finds nothing there"


class Odd:
    """A backend in this process, whose methods raise what they are told to."""

    def __init__(self, **raised: Exception) -> None:
        self.address = "here"
        self.stopped = False
        self._raised = raised

    async def start(self) -> None:
        self._do("start")

    async def is_healthy(self) -> bool:
        self._do("is_healthy")
        return not self.stopped

    async def scrub(self) -> None:
        self._do("scrub")

    async def stop(self) -> None:
        self.stopped = True
        self._do("stop")

    def _do(self, method: str) -> None:
        if method in self._raised:
            raise self._raised[method]


@pytest.mark.parametrize("method", ["scrub", "is_healthy", "stop"])
async def test_a_backend_is_replaced_whatever_it_raises(method: str) -> None:
    made: list[Odd] = []

    def make(number: int) -> Odd:
        made.append(Odd() if made else Odd(**dict.fromkeys({method, "scrub"}, RecursionError("too deep"))))
        return made[-1]

    async with BackendPool(make, 1) as pool:
        if method == "is_healthy":
            assert await pool.take("b") is made[1]
            return
        await pool.take("a")
        with pytest.raises(EnvironmentLost, match="backend 0 could not be scrubbed: RecursionError: too deep"):
            await pool.renew("a")
        await pool.give_back("a")
        assert await pool.take("b") is made[1]
        assert made[0].stopped


async def test_a_backend_that_could_not_be_started_is_tried_again() -> None:
    made: list[Odd] = []

    def make(number: int) -> Odd:
        is_bad = 1 <= len(made) <= 2 * START_TRIES
        made.append(Odd(start=RuntimeError("no memory")) if is_bad else Odd())
        return made[-1]

    async with BackendPool(make, 1, pause_s=0.01) as pool:
        await pool.take("a")
        await pool.give_back("a", in_use=True)
        with pytest.raises(EnvironmentLost, match="none of the 1 backends works"):
            await pool.take("b")
        await until(lambda: pool.counts()["ready"] == 1)
        assert await pool.take("c") is made[2 * START_TRIES + 1]


async def test_a_pool_is_closed_while_backends_are_being_replaced_and_those_that_wait_for_one_are_told() -> None:
    class Endless(Odd):
        async def start(self) -> None:
            await asyncio.Event().wait()

    made: list[Odd] = []

    def make(number: int) -> Odd:
        made.append(Endless() if made else Odd())
        return made[-1]

    pool = await BackendPool(make, 1).__aenter__()
    await pool.take("a")
    await pool.give_back("a", in_use=True)
    waiting = asyncio.create_task(pool.take("b"))
    await until(lambda: len(made) == 2)
    async with asyncio.timeout(PATIENCE_S):
        await pool.close()
        with pytest.raises(EnvironmentLost, match="none of the 1 backends works"):
            await waiting
    assert all(each.stopped for each in made)


async def test_a_session_keeps_its_backend_when_it_is_made_new() -> None:
    async with BackendPool(simulator, 1) as pool:
        backend = await pool.take("a")
        await put(backend, "of the task before")
        await pool.renew("a")
        assert await kept(backend) == ""
        assert await pool.take("a") is backend
        await pool.give_back("a")
        with pytest.raises(EnvironmentLost, match="no backend left"):
            await pool.renew("a")


async def test_ports_begin_at_the_base_and_a_port_in_use_is_named() -> None:
    base = free_port()
    async with BackendPool(lambda number: simulator(number, base), 1) as pool:
        assert (await pool.take("a")).address == f"http://127.0.0.1:{base}"
        with pytest.raises(EnvironmentLost, match=f"port {base} is in use"):
            await simulator(0, base).start()


async def test_a_pool_whose_backend_does_not_start_starts_none() -> None:
    started: list[SimulatorProcess] = []

    def make(number: int) -> SimulatorProcess:
        made = (
            simulator(number)
            if number == 0
            else SimulatorProcess(
                [sys.executable, "-c", "raise SystemExit(4)"],
                health="/health",
                reset="/reset",
                port=0,
                port_variable="GATEWAY_PORT",
            )
        )
        started.append(made)
        return made

    with pytest.raises(EnvironmentLost, match="exited with code 4 while starting"):
        await BackendPool(make, 2).__aenter__()
    assert [each.pid for each in started] == [None] * len(started), "the one that started was stopped"


async def test_no_process_is_left_after_a_pool() -> None:
    made: list[SimulatorProcess] = []

    def make(number: int) -> SimulatorProcess:
        made.append(simulator(number))
        return made[-1]

    async with BackendPool(make, 2, spares=1) as pool:
        await pool.take("a")
        pids = [each.pid for each in made]
        assert all(pid is not None and psutil.pid_exists(pid) for pid in pids)
    assert not any(pid is not None and psutil.pid_exists(pid) for pid in pids)


async def test_many_sessions_share_few_backends_without_meeting() -> None:
    async with BackendPool(simulator, 3) as pool:
        gate = asyncio.Semaphore(3)

        async def use(session: str) -> None:
            async with gate:
                backend = await pool.take(session)
                assert await kept(backend) == ""
                await put(backend, session)
                assert await kept(backend) == session
                await pool.give_back(session)

        await asyncio.gather(*(use(f"s{number}") for number in range(12)))
        assert pool.counts() == {"ready": 3, "bound": 0, "replacing": 0}
