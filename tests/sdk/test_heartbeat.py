"""The heartbeat of clients: whole programs that are killed, block, fork and exit, beside a real hive."""

import asyncio
import gc
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from bombus import AsyncSwarmClient, SwarmClient, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.hive.events import AbortReason
from bombus.hive.inbox import Touch
from bombus.hive.state import Phase
from bombus.sdk.claimed import ClaimedEpisodes
from bombus.sdk.heartbeat import THREAD, Heartbeat, end_each
from bombus.sdk.transport import client_options
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.patience import PATIENCE_S, until

SILENCE_S = 4.0
RULES = {"batch_size": 1, "client_silence_s": SILENCE_S}
JOB = {"bombus": {"model": {"path": "tiny"}, "collection": RULES, "rollout": {"num_repeat": 2, "max_env_worker": 16}}}
TASK = Task(task_id="t1", main_query="1+1")

# Holds episodes, forks a process that ends at once, and blocks its thread, and so its loop, until it is told to go on.
# Then it ends one of its episodes, and exits while another is open.
PROGRAM = """
import asyncio, os, sys
from bombus import AsyncSwarmClient, Task, WorkflowOutput

async def main():
    client = AsyncSwarmClient(sys.argv[1])
    one, *others = await client.begin_episodes(int(sys.argv[2]))
    if os.fork() == 0:
        sys.exit()
    os.wait()
    print(client.client_uuid, flush=True)
    sys.stdin.readline()
    await client.end_episode(Task(task_id="t1", main_query=""), one.episode_uuid, WorkflowOutput(reward=0.0))

asyncio.run(main())
"""


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        await played.start(JOB)
        yield played


@asynccontextmanager
async def program(url: str, episodes: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start a program, and give its client's id once it has so many episodes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, url, str(episodes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * PATIENCE_S):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_client_holds_up_a_batch_for_its_silence_alone_and_no_client_that_lives_loses_anything(
    played: PlayedHive,
) -> None:
    async with (
        played.served() as url,
        program(url, 4) as (dead, its_id),
        program(url, 2) as (blocked, blocked_id),
        AsyncSwarmClient(url, verbose=False) as client,
    ):
        held = [one.episode_uuid for one in await client.begin_episodes(2)]
        await client.end_episodes([(TASK, one, WorkflowOutput(reward=float(n))) for n, one in enumerate(held)])
        await played.phase(Phase.ROLLING_POST)
        await played.until_received(lambda message: isinstance(message, Touch) and its_id in message.clients)
        dead.send_signal(signal.SIGKILL)
        open_ones = played.engine.open.values()
        await played.gateway.follower.wait_for(lambda _: all(one.client != its_id for one in open_ones), PATIENCE_S)
        assert [one.client for one in open_ones] == [blocked_id] * 2, "a program whose loop is blocked lives"
        assert blocked.stdin is not None
        blocked.stdin.write(b"go on\n")
        await played.phase(Phase.WEIGHT_SYNCING)  # the batch is complete
        assert await blocked.wait() == 0
    reasons = [closed.aborted for closed in played.engine.closed.values()]
    assert reasons.count(AbortReason.SILENT) == 4
    assert reasons.count(AbortReason.CLIENT) == 1, "an exit is told at once, and that of a fork is none"
    assert reasons.count(None) == 3


async def test_a_client_that_is_closed_leaves_no_episode_open_and_one_that_nothing_refers_to_no_thread(
    played: PlayedHive,
) -> None:
    def claim() -> None:
        with SwarmClient(url, verbose=False) as closed:
            closed.begin_episodes(2)
        client = SwarmClient(url, verbose=False)
        client.begin_episode()

    async with played.served() as url:
        async with AsyncSwarmClient(url, verbose=False) as client:
            await client.begin_episode()
        before = threading.enumerate()
        await asyncio.to_thread(claim)
        begun = [thread for thread in threading.enumerate() if thread.name == THREAD and thread not in before]

        def ended() -> bool:
            gc.collect()  # again and again: a thread refers to its client while it beats
            return not any(thread.is_alive() for thread in begun)

        await until(ended)
        await played.gateway.follower.wait_for(lambda _: len(played.engine.closed) >= 3, PATIENCE_S)
        assert [closed.aborted for closed in played.engine.closed.values()].count(AbortReason.CLIENT) == 3


def hold_an_episode(claimed: ClaimedEpisodes) -> None:
    """Let a client have an episode, of which no hive knows."""
    claimed.note(["e1"], 240.0, None)


async def test_a_client_whose_closing_is_cancelled_leaves_no_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncSwarmClient(f"http://127.0.0.1:{silent.getsockname()[1]}", verbose=False)
        hold_an_episode(client.claimed)
        with suppress(TimeoutError):
            await asyncio.wait_for(client.close(), 0.05)
        assert all(http.is_closed for http in client._pools.made)


def test_the_clients_of_a_process_and_their_heartbeats_read_the_root_certificates_once() -> None:
    """It takes 25 ms."""
    options = [client_options(f"http://hive-{number}:1", None, "") for number in range(2)]
    assert options[0]["verify"] is options[1]["verify"]
    assert options[0]["verify"].verify_mode == ssl.CERT_REQUIRED


def test_a_program_that_exits_waits_only_once_for_a_hive_that_does_not_answer_however_many_clients_it_has() -> None:
    beats: list[tuple[ClaimedEpisodes, Heartbeat]] = []
    for _ in range(3):
        claimed = ClaimedEpisodes("http://127.0.0.1:9", time.monotonic)
        hold_an_episode(claimed)
        beats.append((claimed, Heartbeat(claimed, client_options(claimed.root, None, ""))))
    end_each([each for _, each in beats], within_s=0.0)
    assert [claimed.open() for claimed, _ in beats] == [[], ["e1"], ["e1"]]
    end_each([each for _, each in beats], within_s=60.0)
    assert [claimed.open() for claimed, _ in beats] == [[], [], []]
