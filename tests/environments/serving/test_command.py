"""`bombus env serve`: what it refuses, and the variables that it honours."""

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bombus.cli import main
from bombus.environments.backends.kinds import REAL
from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.process import ministack
from bombus.environments.kinds import EnvironmentLost
from bombus.environments.pools.session import SessionSettings
from bombus.environments.serving.running import BackendKind, Deployment, backends_of, deployed
from bombus.environments.serving.settings import ServingSettings
from bombus.errors import Refused
from bombus.machine.process import listen
from tests.environments.serving.served import ServerProcess

PAGE = (Path(__file__).parents[3] / "docs/pools.md").read_text()
SECONDS = {"s": 1, "minutes": 60}
COUNTER = "tests.environments.small_environments:Counter"
STORE = "tests.environments.serving.test_plain_classes:Store"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([COUNTER, "--host", "0.0.0.0"], "pass --key-file, or --trusted-network if anyone"),
        ([COUNTER, "--slots", "0"], "slots"),
        ([COUNTER, "--ttl-s", "0"], "--ttl-s"),
        ([COUNTER, "--port", "-1"], "--port -1 is refused"),
        ([COUNTER, "--spares", "65"], "--spares 65 is refused"),
        ([COUNTER, "--key-file", "/nonexistent"], "cannot be read"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "serve", *flags]) == 2
    assert why in capsys.readouterr().err


def test_a_pool_size_in_the_environment_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_RL_ENV_POOL_SIZE", "many")
    assert main(["env", "serve", COUNTER]) == 2
    assert "AWS_RL_ENV_POOL_SIZE is 'many': it must be a number from 1 to 1024" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "slots"), [(None, 1), ("3", 3)])
async def test_there_are_as_many_slots_as_a_variable_says_or_one(
    given: str | None, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is not None:
        monkeypatch.setenv("AWS_RL_ENV_POOL_SIZE", given)
    async with ServerProcess() as server:
        assert (await server.counts())["slots"] == slots


def test_the_times_of_the_page_are_those_of_a_server() -> None:
    told = re.findall(r"`--(\w+)-s` \((\d+) (s|minutes)\)", PAGE)
    defaults = ServingSettings()
    assert {name: int(count) * SECONDS[unit] for name, count, unit in told} == {
        "ttl": defaults.ttl_s,
        "idle": defaults.idle_s,
        "step": defaults.step_s,
    }


def test_a_session_gives_itself_up_before_its_server_does_where_nothing_is_said() -> None:
    assert SessionSettings().idle_s < ServingSettings().idle_s


def deployment(path: str = STORE, backend: BackendKind = BackendKind.NONE, slots: int = 2) -> Deployment:
    return Deployment(path=path, settings=ServingSettings(slots=slots), backend=backend)


def test_b2_one_variable_chooses_between_the_simulator_and_the_real_backend() -> None:
    wanted = deployment(backend=BackendKind.MINISTACK, slots=1)
    assert isinstance(backends_of(wanted, {}), BackendPool)
    assert isinstance(backends_of(wanted, {"BACKEND_TYPE": "simulator"}), BackendPool)
    assert backends_of(wanted, {"BACKEND_TYPE": "aws"}) is REAL, "the pool is off"
    with pytest.raises(Refused, match="it must be simulator or aws"):
        backends_of(wanted, {"BACKEND_TYPE": "azure"})
    with pytest.raises(Refused, match="serve it with --slots 1"):
        backends_of(deployment(backend=BackendKind.MINISTACK), {"BACKEND_TYPE": "aws"})


@pytest.mark.parametrize("port", ["0", "65535", "high"])
def test_a_base_port_that_leaves_no_room_is_refused(port: str) -> None:
    with pytest.raises(Refused, match="AWS_RL_ENV_MINISTACK_BASE_PORT"):
        backends_of(deployment(backend=BackendKind.MINISTACK), {"AWS_RL_ENV_MINISTACK_BASE_PORT": port})


async def test_simulators_have_the_ports_from_the_base_on() -> None:
    with listen("127.0.0.1", 0) as bound:
        bound.listen()
        taken = bound.getsockname()[1]
        for number in range(3):
            with pytest.raises(EnvironmentLost, match=f"port {taken} is in use"):
                await ministack(number, taken - number).start()
        wanted = deployment(backend=BackendKind.MINISTACK, slots=1)
        pool = backends_of(wanted, {"AWS_RL_ENV_MINISTACK_BASE_PORT": str(taken)})
        assert isinstance(pool, BackendPool)
        with pytest.raises(EnvironmentLost, match=f"port {taken} is in use"):
            await pool.__aenter__()


def test_a_pool_of_simulators_says_whose_it_is() -> None:
    pool = backends_of(deployment(backend=BackendKind.MINISTACK), {})
    assert isinstance(pool, BackendPool)
    assert pool.exhausted == "MiniStack pool exhausted"


@contextlib.asynccontextmanager
async def running(wanted: Deployment) -> AsyncIterator[str]:
    bound = listen("127.0.0.1", 0)
    async with deployed(wanted, bound, {}):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def test_the_playground_is_there_for_one_slot_and_not_for_more() -> None:
    async with running(deployment(COUNTER, slots=1)) as url, httpx.AsyncClient() as http:
        page = await http.get(url)
        assert page.headers["content-type"].startswith("text/html")
        assert f"<title>{COUNTER}</title>" in page.text
        assert "default-src" in page.headers["content-security-policy"]
    async with running(deployment(COUNTER, slots=2)) as url, httpx.AsyncClient() as http:
        refused = await http.get(url)
        assert refused.status_code == 404
        assert refused.json()["detail"].endswith("but this server has 2: serve the class with --slots 1")


async def test_a_class_that_takes_no_backend_is_refused_one() -> None:
    with pytest.raises(Refused, match="takes no backend: give its __init__ a parameter `backend`"):
        async with running(deployment(COUNTER, BackendKind.SHELL)):
            pass
