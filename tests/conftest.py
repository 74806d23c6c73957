"""Fixtures of many tests: one real nats-server for the whole run, and a separate hive for each test."""

import asyncio
import gc
import importlib.util
import itertools
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bombus.bus import Bus, EmbeddedServer
from bombus.bus.streams import stream_configs
from bombus.config.streams import StreamLimits
from tests.effort import LONG

if TYPE_CHECKING:
    from bombus import AsyncSwarmClient
    from tests.gateway.openai_hive import GatewayHive

MB = 1 << 20
SMALL_STREAMS = StreamLimits(
    inbox_bytes_max=64 * MB,
    events_bytes_max=64 * MB,
    calls_bytes_max=64 * MB,
    ops_bytes_max=64 * MB,
    trajectories_bytes_max=64 * MB,
    blobs_bytes_max=64 * MB,
)
# Files with the longest tests, in the order in which they start, so that no worker is left alone with one at the end.
LONGEST = [
    "test_sim",
    "test_chaos",
    "test_fuzz",
    "test_kills",
    "test_up",
    "test_played",
    "test_hangs",
    "test_server_kills",
    "test_driver",
    "test_cluster",
    "test_rank_leader",
    "test_installing",
    "test_replicas",
]
MEMORY_BYTES = 4 << 30  # that the files of the shared nats-server may take at most
FREEZE_EVERY = 500  # tests
_numbers, _ended = itertools.count(1), itertools.count(1)

if importlib.util.find_spec("hypothesis") is not None:  # the environments of others' clients do without
    from hypothesis import HealthCheck, settings

    # Other programs may need the machine at the same time: no example is wrong because it took long.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read by torch when it is first imported. Several workers with a thread for each core would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Torch, transformers and the collected tests are millions of objects that stay: look for garbage less often.
gc.set_threshold(50_000, 20, 20)

# Each HTTP client that is made reads all root certificates, which takes 25 ms. All servers here are local: one will do.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "no_root.pem")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three workers more than there are cores: many tests wait for processes and deadlines."""
    return (os.cpu_count() or 1) + 3


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests that share a module's fixture on one worker."""
    if isinstance(item, pytest.Function) and item.config.pluginmanager.hasplugin("xdist"):
        definitions = item._fixtureinfo.name2fixturedefs.values()
        if any(definition.scope == "module" for each in definitions for definition in each):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `make test-long`, and put the longest files first, after the order was shuffled."""
    left_out = [] if LONG else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish() -> None:
    """Leave out of later collections of garbage what was imported and collected: each would take 0.3 s longer."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Now and then, exempt from garbage collection what pytest keeps of tests that have run, a hundred objects each."""
    if next(_ended) % FREEZE_EVERY == 0:
        pytest_collection_finish()


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the tests have cost; the workers have ended by now."""
    terminalreporter.write_line(f"{cpu_seconds():.0f} s of CPU")


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """Return the URL of a nats-server that runs for the whole session. Tests that kill one start their own.

    Its files are in memory where there is room: tests make thousands of streams, and remove them.
    """
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_BYTES
    # Streams reserve their limits. Tests make many hives and fill none, so the sum may exceed the disk.
    with tempfile.TemporaryDirectory(prefix="bombus-tests-", dir=memory if has_room else None) as folder:
        server = EmbeddedServer(Path(folder), store_bytes_max=100 << 40)
        server.start()
        yield server.url
        server.stop()


async def freeze(server: EmbeddedServer) -> None:
    """Stop the server as if its machine hung; `thaw` lets it continue."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    status = Path(f"/proc/{server.pid}/task")
    while not all("\nState:\tT" in (task / "status").read_text() for task in status.iterdir()):
        await asyncio.sleep(0.001)


def kill(server: EmbeddedServer) -> None:
    """Kill the server at once, as a crash would, and wait until it is gone."""
    if server.pid is not None:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()


def thaw(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def hive() -> str:
    """Return the name of a hive that no other test uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


@pytest.fixture
async def bus(nats_url: str, hive: str) -> AsyncIterator[Bus]:
    """Yield a connection to a hive whose streams exist and are removed afterwards."""
    async with await Bus.connect(nats_url, hive, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        yield bus
        for config in stream_configs(bus.subjects, SMALL_STREAMS):
            await bus.requests.request(f"$JS.API.STREAM.DELETE.{config['name']}")


@pytest.fixture
async def crashing(tmp_path: Path) -> AsyncIterator[tuple[EmbeddedServer, Bus]]:
    """Yield a server for one test, which may kill or freeze it, and a connection to it."""
    server = EmbeddedServer(tmp_path / "nats")
    await asyncio.to_thread(server.start)
    try:
        async with await Bus.connect(server.url, "h") as bus:
            await bus.ensure_streams(SMALL_STREAMS)
            yield server, bus
    finally:
        server.stop(timeout_s=2)


@pytest.fixture
async def served(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator["GatewayHive"]:
    """Yield a hive whose model is scripted, with the module's `JOB` if it has one."""
    from tests.gateway.openai_hive import gateway_hive  # imported here: not all environments have a gateway

    async with gateway_hive(bus, getattr(request.module, "JOB", None)) as served:
        yield served


@pytest.fixture
async def client(served: "GatewayHive") -> AsyncIterator["AsyncSwarmClient"]:
    from bombus import AsyncSwarmClient

    async with AsyncSwarmClient(served.base_url, verbose=False) as client:
        yield client
