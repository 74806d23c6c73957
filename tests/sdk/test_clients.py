"""Both clients against a whole hive over real HTTP: real bus, coordinator and gateway."""

import asyncio
import inspect
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from bombus import AsyncSwarmClient, Credentials, EpisodesFailed, InfraError, Job, SwarmClient, Task, WorkflowOutput
from bombus.bus import Bus
from bombus.hive.episodes import without_secret
from bombus.hive.events import AbortReason
from bombus.hive.failures import FailureKind
from bombus.hive.inbox import AnyMessage, Claim, Touch
from bombus.hive.state import Phase
from bombus.machine.hive_keys import HiveKeys
from bombus.sdk import running, threads, transport
from bombus.sdk.errors import BadRequest, EpisodeGone, NotYourEpisode, OtherOutcome, ServerUnreachable, Unauthorized
from bombus.sdk.multi_model import HiveCore
from bombus.sdk.progress import ProgressBar
from tests.ctrl_c import heed_the_terminal
from tests.gateway.swarm_hive import PlayedHive, played_hive
from tests.patience import PATIENCE_S

JOB = Job(model="tiny", batch_size=2, num_repeat=2, max_env_worker=8)
TASK = Task(task_id="t1", main_query="1+1")


@pytest.fixture
async def played(bus: Bus) -> AsyncIterator[PlayedHive]:
    async with played_hive(bus) as played:
        yield played


@pytest.fixture
async def url(played: PlayedHive) -> AsyncIterator[str]:
    await played.start()
    async with played.served() as url:
        yield url


async def test_a_client_starts_an_engine_and_runs_an_episode(played: PlayedHive) -> None:
    async with played.served() as url:
        with SwarmClient(url) as client:
            starting = asyncio.create_task(asyncio.to_thread(client.auto_sync_train_config_and_start_engine, JOB))
            await played.phase(Phase.BOOTING)
            await played.boot()
            await starting
            assert played.engine.collection.batch_size == 2

            episode, credentials = await asyncio.to_thread(client.begin_episode)
            assert credentials.base_url == f"{url}/v1"
            assert credentials.api_key.startswith("sk-bombus-")
            assert credentials.model == "tiny"
            assert await asyncio.to_thread(client.can_continue_episode, episode)
            output = WorkflowOutput(reward=1.0, is_success=True, log_metrics={"length": [1.0, 3.0]})
            await asyncio.to_thread(client.end_episode, TASK, episode, output)
            stat = await asyncio.to_thread(client.get_rollout_stat)
            assert stat.completed_tasks_rewards == {"t1": [1.0]}
            assert await asyncio.to_thread(client.get_global_step) == 0
            await asyncio.to_thread(client.stop_engine)
            assert (await asyncio.to_thread(client.get_engine_status))[0] == "ENGINE.OFFLINE"


async def test_the_async_client_does_the_same(played: PlayedHive) -> None:
    async with played.served() as url, AsyncSwarmClient(url) as client:
        starting = asyncio.create_task(client.auto_sync_train_config_and_start_engine(JOB))
        await played.phase(Phase.BOOTING)
        await played.boot()
        await starting
        episode, credentials = await client.begin_episode()
        assert credentials.base_url == f"{url}/v1"
        async with client.keep_alive(episode, every_s=0.01):
            await played.until_received(lambda message: credentials.episode in getattr(message, "episodes", ()))
        await client.end_episode(TASK, episode, WorkflowOutput(reward=1.0))
        await client.end_episode(TASK, episode, WorkflowOutput(reward=1.0))
        with pytest.raises(OtherOutcome):
            await client.end_episode(TASK, episode, WorkflowOutput(reward=0.0))
        assert await client.touch_episodes([episode]) == [episode]
        with pytest.raises(EpisodeGone):
            await client.end_episode(TASK, played.gateway.keys.claimed_id("main-1-99"), WorkflowOutput(reward=0.0))


def test_threads_have_each_operation_with_its_signature_and_its_documentation() -> None:
    operations = {name for name, _ in inspect.getmembers(HiveCore, inspect.iscoroutinefunction) if name[0] != "_"}
    assert {"begin_episode", "end_multi_model_episode", "stop_engine"} <= operations
    for name in operations:
        method, operation = getattr(SwarmClient, name), getattr(AsyncSwarmClient, name)
        assert inspect.signature(method) == inspect.signature(operation), name
        assert method.__doc__ == operation.__doc__, name
        assert method.__doc__, name
        assert not inspect.iscoroutinefunction(method), name


@pytest.mark.parametrize("turns", [2, 10, 20, 40, 80])
async def test_a_claim_that_is_cancelled_leaves_no_episode_open(played: PlayedHive, url: str, turns: int) -> None:
    async with AsyncSwarmClient(url) as client:
        claims = [asyncio.create_task(client.begin_episode()) for _ in range(4)]
        for _ in range(turns):
            await asyncio.sleep(0)
        left = [claim for claim in claims if not claim.done()]
        for claim in left:
            claim.cancel()
        await asyncio.wait(claims)
        assert all(claim.cancelled() for claim in left)
        await client.abort_episodes([claim.result()[0] for claim in claims if claim not in left])
        await played.gateway.follower.wait_for(lambda _: not played.engine.open, PATIENCE_S)


class _CtrlC(httpx.HTTPTransport):
    """Is interrupted when the first reply to a claim has come."""

    interrupted = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path.endswith("/claim_episodes") and not self.interrupted:
            self.interrupted = True
            response.read()
            raise KeyboardInterrupt
        return response


async def test_a_client_that_is_interrupted_while_it_claims_leaves_no_episode_open(
    played: PlayedHive, url: str
) -> None:
    def claim() -> None:
        with SwarmClient(url, transport_=_CtrlC()) as client, pytest.raises(KeyboardInterrupt):
            client.begin_episode()

    await asyncio.to_thread(claim)
    await played.gateway.follower.wait_for(lambda _: not played.engine.open, PATIENCE_S)
    (closed,) = played.engine.closed.values()
    assert closed.aborted == AbortReason.CLIENT


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_episodes_that_are_done_are_kept_while_the_rest_of_their_group_goes_on(
    played: PlayedHive, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "KEEP_FINISHED_S", 0.01)
    kept = threading.Event()
    names: list[str] = []

    async def agent(task: Task, credentials: Credentials) -> float:
        names.append(credentials.episode)
        if len(names) == 1:
            await asyncio.to_thread(kept.wait, PATIENCE_S)
        return 1.0

    def threaded() -> None:
        with SwarmClient(url, verbose=False) as client:
            client.run_group(TASK, agent, 2)

    async def grouped() -> None:
        async with AsyncSwarmClient(url, verbose=False) as client:
            await client.run_group(TASK, agent, 2)

    group = asyncio.create_task(grouped() if kind == "async" else asyncio.to_thread(threaded))
    await played.until_received(
        lambda message: isinstance(message, Touch) and bool(names) and message.episodes == tuple(names[1:])
    )
    kept.set()
    await group


async def test_another_clients_episode_cannot_be_ended(url: str) -> None:
    async with AsyncSwarmClient(url) as one, AsyncSwarmClient(url, engine="main") as two:
        episode, _ = await one.begin_episode()
        with pytest.raises(NotYourEpisode):
            await two.end_episode(TASK, episode, WorkflowOutput(reward=1.0))


async def test_the_base_url_of_any_engine_is_the_hives_own(url: str) -> None:
    async with AsyncSwarmClient(url, engine="main") as client:
        _, credentials = await client.begin_episode()
    assert credentials.base_url == f"{url}/v1"


@pytest.mark.parametrize("in_path", [False, True])
async def test_a_key_permits_what_it_is_for(bus: Bus, in_path: bool) -> None:
    keys = HiveKeys(admin="an-admin-key-for-tests", client="a-client-key-for-tests")
    async with played_hive(bus, keys=keys) as played, played.served() as url:

        def client(key: str, engine: str | None = None) -> AsyncSwarmClient:
            if in_path:
                return AsyncSwarmClient(f"{url}/k/{key}/", engine=engine)
            return AsyncSwarmClient(url, engine=engine, api_key=key)

        async with AsyncSwarmClient(url, api_key="") as nobody:
            with pytest.raises(Unauthorized, match="no key was sent"):
                await nobody.get_engine_status()
        async with client(keys.admin) as admin:
            starting = asyncio.create_task(admin.auto_sync_train_config_and_start_engine(JOB))
            await played.phase(Phase.BOOTING)
            await played.boot()
            await starting
        async with client(keys.client, engine="main") as worker:
            with pytest.raises(Unauthorized, match="admin key"):
                await worker.stop_engine()
            _, credentials = await worker.begin_episode()
            assert credentials.base_url == f"{url}/v1"  # an agent does not get its client's key


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_an_answer_that_cannot_be_unpacked_is_none(kind: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"this is not gzip"))

    def ask() -> None:
        with SwarmClient("http://hive", transport_=httpx.MockTransport(handler), retry_s=0) as client:
            client.abort_episode("e1")

    async def ask_too() -> None:
        async with AsyncSwarmClient("http://hive", transport_=httpx.MockTransport(handler), retry_s=0) as client:
            await client.abort_episode("e1")

    with pytest.raises(ServerUnreachable, match=r"no answer from http://hive.*DecodingError"):
        await (ask_too() if kind == "async" else asyncio.to_thread(ask))


def test_a_key_is_sent_in_the_header_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "a-client-key-for-tests"
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        raise httpx.ConnectError("refused")

    with SwarmClient(f"http://hive/k/{key}", transport_=httpx.MockTransport(handler), retry_s=0) as client:
        with pytest.raises(ServerUnreachable) as lost:
            client.abort_episode("e1")
        shown = [
            client.server_url,
            repr(vars(client)),
            repr(lost.value),
            caplog.text,
            str(seen[0].url),
            repr(seen[0].headers),
        ]
    assert seen[0].headers["authorization"] == f"Bearer {key}"
    assert all(key not in text for text in shown)
    credentials = repr(Credentials(base_url="u", api_key="sk-1", model="m", episode_uuid="e.secret"))
    assert "sk-1" not in credentials
    assert "secret" not in credentials


@pytest.mark.parametrize(
    ("url", "api_key", "environment", "expected"),
    [
        ("http://h:1/", None, {}, ("http://h:1", "")),
        ("http://h:1", "given", {"BOMBUS_ADMIN_KEY": "a"}, ("http://h:1", "given")),
        ("http://h:1", "", {"BOMBUS_ADMIN_KEY": "a"}, ("http://h:1", "")),
        ("http://h:1", None, {"BOMBUS_ADMIN_KEY": "a\n", "BOMBUS_CLIENT_KEY": "c"}, ("http://h:1", "a")),
        ("http://h:1", None, {"BOMBUS_CLIENT_KEY": "c"}, ("http://h:1", "c")),
        ("http://h:1/hive/k/path/", None, {"BOMBUS_CLIENT_KEY": "c"}, ("http://h:1/hive", "path")),
        ("http://h:1/k/path", "given", {}, ("http://h:1", "given")),
    ],
)
def test_a_key_comes_from_the_argument_the_url_or_the_environment(
    url: str, api_key: str | None, environment: dict[str, str], expected: tuple[str, str]
) -> None:
    assert transport.address(url, api_key, environment) == expected


@pytest.mark.parametrize("url", ["hive/k/secret", "http://hive/k/secret/e/main", "http://hive/k/sec ret"])
def test_the_refusal_of_an_invalid_address_does_not_show_its_key(url: str) -> None:
    with pytest.raises(ValueError, match=r"server_url|characters") as refused:
        SwarmClient(url)
    assert "sec" not in str(refused.value)


# ---- running many ---------------------------------------------------------------------------------------------


async def test_a_group_is_claimed_and_ended_in_one_request_each(url: str, played: PlayedHive) -> None:
    tasks_met = threading.Barrier(2, timeout=10)  # both episodes run at once

    def agent(task: Task, credentials: Credentials) -> float:
        tasks_met.wait()
        return float(credentials.episode.endswith("1"))

    with SwarmClient(url) as client:
        outputs = await asyncio.to_thread(client.run_group, TASK, agent, 2)
    assert {output.reward for output in outputs if output} == {0.0, 1.0}
    assert len(played.engine.pool) == 2


async def test_a_broken_environment_costs_its_group_one_episode_and_does_not_blame_the_model(
    url: str, played: PlayedHive
) -> None:
    async def agent(task: Task, credentials: Credentials) -> float:
        if credentials.episode.endswith("-1"):
            raise InfraError("the browser crashed")
        return 1.0

    async with AsyncSwarmClient(url) as client:
        outputs = await client.run_group(TASK, agent, 2)
        assert outputs[0] is None
        assert outputs[1] is not None
        assert played.engine.closed["main-1-1"].aborted == AbortReason.INFRA
        assert len(played.engine.pool) == 1

        async def broken(task: Task, credentials: Credentials) -> float:
            raise ValueError("a bug")

        with pytest.raises(EpisodesFailed, match="a bug"):
            await client.run_group(TASK, broken, 2)
    assert played.engine.closed["main-1-3"].aborted == AbortReason.CLIENT
    assert not played.engine.open


AnyClient = SwarmClient | AsyncSwarmClient
GroupAgent = Callable[[AnyClient, Credentials], Awaitable[WorkflowOutput | float]]


async def grouped(
    url: str, kind: str, agent: GroupAgent, n: int, replace_infra: int
) -> tuple[list[WorkflowOutput | None], dict[str, int]]:
    """Run a group with either client. Returns its outputs, and what was lost."""

    def threaded() -> tuple[list[WorkflowOutput | None], dict[str, int]]:
        with SwarmClient(url, verbose=False) as client:
            client.lost_episodes = Counter()  # as a loop does that counts anew in each step
            return client.run_group(
                TASK, lambda _, credentials: agent(client, credentials), n, replace_infra=replace_infra
            ), dict(client.lost_episodes)

    if kind == "threads":
        return await asyncio.to_thread(threaded)
    async with AsyncSwarmClient(url, verbose=False) as client:
        client.lost_episodes = Counter()
        return await client.run_group(
            TASK, lambda _, credentials: agent(client, credentials), n, replace_infra=replace_infra
        ), dict(client.lost_episodes)


def rewards_of(outputs: Sequence[WorkflowOutput | None]) -> list[object]:
    return [output and output.reward for output in outputs]


@pytest.mark.parametrize("kind", ["async", "threads"])
@pytest.mark.parametrize(("replace_infra", "rewards"), [(0, {None: 1, 1.0: 2}), (1, {1.0: 3})])
async def test_an_episode_that_the_hive_takes_back_costs_its_group_that_episode(
    url: str, played: PlayedHive, kind: str, replace_infra: int, rewards: dict[object, int]
) -> None:
    async def agent(client: AnyClient, credentials: Credentials) -> float:
        if credentials.episode == "main-1-2":  # as the hive does with one that is idle
            aborting = client.abort_episode(credentials.episode_uuid, failure=FailureKind.ENVIRONMENT)
            if aborting is not None:
                await aborting
        return 1.0

    outputs, lost = await grouped(url, kind, agent, 3, replace_infra)
    assert Counter(rewards_of(outputs)) == rewards
    assert lost == {"EpisodeGone": 1}
    assert len(played.engine.pool) == 2 + replace_infra
    assert not played.engine.open


@pytest.mark.parametrize("kind", ["async", "threads"])
@pytest.mark.parametrize("reward", [1e10, float("nan"), None, {"no such call": 1.0}])
async def test_a_reward_that_the_hive_refuses_costs_its_group_one_episode(
    url: str, played: PlayedHive, kind: str, reward: float | dict[str, float] | None
) -> None:
    async def agent(client: AnyClient, credentials: Credentials) -> WorkflowOutput:
        return WorkflowOutput(reward=reward if credentials.episode == "main-1-2" else 1.0)

    outputs, lost = await grouped(url, kind, agent, 3, 0)
    assert Counter(rewards_of(outputs)) == {None: 1, 1.0: 2}
    assert lost == {"BadReward": 1}
    assert len(played.engine.pool) == 2
    assert not played.engine.open
    assert played.engine.closed["main-1-2"].aborted == AbortReason.INFRA
    assert played.engine.counters.aborted_by == {FailureKind.GRADER: 1}


async def let_a_cancellation_out() -> None:
    helper = asyncio.create_task(asyncio.sleep(PATIENCE_S))
    helper.cancel()
    await helper


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_an_agent_that_lets_out_a_cancellation_of_its_own_has_failed_like_any_other(
    url: str, played: PlayedHive, kind: str
) -> None:
    async def agent(client: AnyClient, credentials: Credentials) -> float:
        if credentials.episode == "main-1-2":
            await let_a_cancellation_out()
        return 1.0

    outputs, lost = await grouped(url, kind, agent, 2, 0)
    assert Counter(rewards_of(outputs)) == {None: 1, 1.0: 1}
    assert lost == {"RuntimeError": 1}
    assert not played.engine.open


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_so_has_one_that_has_caught_a_failed_group_of_tasks_before(
    url: str, played: PlayedHive, kind: str
) -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async def agent(client: AnyClient, credentials: Credentials) -> float:
        if credentials.episode == "main-1-2":
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:  # which cancels the task that waits for it
                    tasks.create_task(fails())
            await let_a_cancellation_out()
        return 1.0

    outputs, lost = await grouped(url, kind, agent, 2, 0)
    assert Counter(rewards_of(outputs)) == {None: 1, 1.0: 1}
    assert lost == {"RuntimeError": 1}
    assert not played.engine.open


async def test_episodes_that_replace_others_are_known_to_an_interrupted_program_too(
    url: str, played: PlayedHive
) -> None:
    def agent(task: Task, credentials: Credentials) -> float:
        if credentials.episode == "main-1-1":
            raise InfraError("the browser crashed")
        return 1.0

    with SwarmClient(url, verbose=False) as client:

        def run(index: int) -> None:
            client.run_group(TASK, agent, 2, replace_infra=1)

        agents = threads.AgentThreads([0], run, 1)
        await asyncio.to_thread(agents.run)
    assert [without_secret(each) for each in agents.interruption.take_claimed()] == ["main-1-1", "main-1-2", "main-1-3"]


class _BrokenEnd(httpx.HTTPTransport):
    """Raises an error that the client does not know, in the request that ends episodes."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/end_episodes"):
            raise OSError("the disk is full")
        return super().handle_request(request)


class _AsyncBrokenEnd(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/end_episodes"):
            raise OSError("the disk is full")
        return await super().handle_async_request(request)


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_a_group_whose_end_fails_leaves_no_episode_open(url: str, played: PlayedHive, kind: str) -> None:
    def threaded() -> None:
        with SwarmClient(url, verbose=False, transport_=_BrokenEnd()) as client:
            client.run_group(TASK, lambda *_: 1.0, 2)

    async def grouped() -> None:
        async def agent(task: Task, credentials: Credentials) -> float:
            return 1.0

        async with AsyncSwarmClient(url, verbose=False, transport_=_AsyncBrokenEnd()) as client:
            await client.run_group(TASK, agent, 2)

    with pytest.raises(OSError, match="the disk is full"):
        await (grouped() if kind == "async" else asyncio.to_thread(threaded))
    await played.gateway.follower.wait_for(lambda _: not played.engine.open, PATIENCE_S)
    assert {closed.aborted for closed in played.engine.closed.values()} == {AbortReason.CLIENT}


@pytest.mark.parametrize("kind", ["async", "threads"])
async def test_metadata_that_cannot_be_sent_costs_no_episode(url: str, played: PlayedHive, kind: str) -> None:
    async def agent(client: AnyClient, credentials: Credentials) -> WorkflowOutput:
        score = object() if credentials.episode == "main-1-2" else 0.5
        return WorkflowOutput(reward=1.0, metadata={"score": score})

    outputs, lost = await grouped(url, kind, agent, 3, 0)
    assert Counter(rewards_of(outputs)) == {1.0: 3}
    assert not lost
    assert len(played.engine.pool) == 3


async def test_a_group_of_a_task_without_an_id_is_refused_before_anything_is_claimed(
    url: str, played: PlayedHive
) -> None:
    async def agent(task: Task, credentials: Credentials) -> float:
        raise AssertionError("it is not played")

    with SwarmClient(url) as client, pytest.raises(ValueError, match="needs an id"):
        await asyncio.to_thread(client.run_group, Task(), agent, 2)
    async with AsyncSwarmClient(url) as client_:
        with pytest.raises(ValueError, match="needs an id"):
            await client_.run_group(Task(), agent, 2)
    assert not played.engine.closed


async def test_a_run_that_fails_is_retried_after_a_pause(url: str) -> None:
    slept: list[float] = []
    tries: dict[str, int] = {}

    def sometimes(task: Task) -> str:
        tries[task.task_id] = tries.get(task.task_id, 0) + 1
        if task.task_id == "bad" or (task.task_id == "shaky" and tries["shaky"] < 3):
            raise RuntimeError(task.task_id)
        return dict[str, str]()["typo"] if task.task_id == "mistaken" else task.task_id.upper()

    tasks = [Task(task_id=name) for name in ("good", "shaky", "bad", "mistaken")]
    with SwarmClient(url, verbose=False, sleep=slept.append) as client:
        with pytest.raises(EpisodesFailed) as caught:
            client.run_episodes_until_all_complete(tasks, sometimes)
        assert caught.value.results == ["GOOD", "SHAKY", None, None]
        assert sorted(caught.value.failures) == [2, 3]
        assert tries == {"good": 1, "shaky": 3, "bad": 3, "mistaken": 1}, "a mistake is one each time"
        assert len(slept) == 4
        tries.clear()
        with pytest.raises(EpisodesFailed):
            client.run_episodes_until_all_complete(tasks, sometimes, auto_retry=False)
        assert tries == {"good": 1, "shaky": 1, "bad": 1, "mistaken": 1}


async def test_many_threads_share_a_client(url: str, played: PlayedHive) -> None:
    with SwarmClient(url, verbose=False) as client:

        def rollout(task: Task) -> str:
            episode, _ = client.begin_episode()
            client.end_episode(task, episode, WorkflowOutput(reward=0.5))
            return episode

        tasks = [Task(task_id="same") for _ in range(24)]
        episodes = await asyncio.to_thread(client.run_episodes_until_all_complete, tasks, rollout, 12)
    assert len(set(episodes)) == 24
    assert len(played.engine.pool) == 24


PROGRAM = """
import asyncio, faulthandler, sys, time
from bombus import AsyncSwarmClient, SwarmClient, Task, WorkflowOutput

faulthandler.enable()
client = SwarmClient(sys.argv[1], verbose=False)

def play(task):
    episode, _ = client.begin_episode(discard_episode_timeout=3600)
    time.sleep(3600)
    client.end_episode(task, episode, WorkflowOutput(reward=1.0))

def play_group(task):
    client.run_group(task, lambda task, credentials: time.sleep(3600), 2, discard_episode_timeout=3600)

async def claim():
    async with AsyncSwarmClient(sys.argv[1], verbose=False) as client:
        await client.begin_episode()

tasks = [Task(task_id=str(number)) for number in range(4)]
match sys.argv[2]:
    case "one":
        client.begin_episode()
    case "async":
        asyncio.run(claim())
    case "all":
        client.run_episodes_until_all_complete(tasks, play)
    case "group":
        client.run_group(tasks[0], lambda task, credentials: time.sleep(3600), 4, discard_episode_timeout=3600)
    case "groups":
        client.run_episodes_until_all_complete(tasks[:2], play_group)
"""


async def program(url: str, what: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, url, what),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=heed_the_terminal,
    )


async def interrupted(process: asyncio.subprocess.Process) -> str:
    """Send Ctrl-C to a program once, wait until it has ended, and return its errors."""
    process.send_signal(signal.SIGINT)
    ending = asyncio.create_task(process.communicate())
    await asyncio.wait({ending}, timeout=PATIENCE_S)
    if not ending.done():
        process.send_signal(signal.SIGABRT)  # its last words are where each of its threads is
    errors = (await ending)[1].decode()
    assert process.returncode == -signal.SIGINT, errors
    return errors


@pytest.mark.parametrize("what", ["all", "group", "groups"])
async def test_ctrl_c_ends_a_program_whose_agents_are_at_work_and_gives_up_their_episodes(
    played: PlayedHive, url: str, what: str
) -> None:
    process = await program(url, what)
    await played.gateway.follower.wait_for(lambda _: len(played.engine.open) == 4, 3 * PATIENCE_S)
    assert (await interrupted(process)).rstrip().endswith("KeyboardInterrupt")
    await played.gateway.follower.wait_for(lambda _: not played.engine.open, PATIENCE_S)
    assert {closed.aborted for closed in played.engine.closed.values()} == {AbortReason.CLIENT}


async def test_ctrl_c_ends_a_program_whose_claims_wait_at_once_and_their_wait_too(played: PlayedHive, url: str) -> None:
    held = [(await played.claim())["episode_uuid"] for _ in range(8)]
    processes = [await program(url, what) for what in ("one", "async", "all")]
    waiting: set[str] = set()

    def all_wait(message: AnyMessage) -> bool:
        if isinstance(message, Claim) and message.client != "c1":
            waiting.add(message.claim)
        return len(waiting) == 6  # four of them are of threads

    await played.until_received(all_wait)
    began = time.monotonic()
    await asyncio.gather(*map(interrupted, processes))
    assert time.monotonic() - began < threads.LEAVE_S, "no thread is waited for"
    await played.post("/abort_episodes", {"client_uuid": "c1", "episode_uuids": held})
    await played.claim()
    assert [episode.client for episode in played.engine.open.values()] == ["c1"]
    assert {closed.client for closed in played.engine.closed.values()} == {"c1"}, "whoever has gone was given none"


async def test_a_group_that_is_cancelled_while_the_hive_is_away_ends_at_once(url: str) -> None:
    away = asyncio.Event()

    class Outage(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if away.is_set():
                raise httpx.ConnectError("nobody is there", request=request)
            return await super().handle_async_request(request)

    async def agent(task: Task, credentials: Credentials) -> float:
        away.set()
        await asyncio.Event().wait()
        return 1.0

    async with AsyncSwarmClient(url, transport_=Outage(), retry_s=3600) as client:
        running = asyncio.create_task(client.run_group(TASK, agent, 2))
        await asyncio.wait_for(away.wait(), PATIENCE_S)
        running.cancel()
        await asyncio.wait({running}, timeout=PATIENCE_S)
        assert running.cancelled()


async def test_a_group_that_is_cancelled_leaves_no_episode_open(played: PlayedHive, url: str) -> None:
    started = asyncio.Event()

    async def agent(task: Task, credentials: Credentials) -> float:
        started.set()
        await asyncio.Event().wait()
        return 1.0

    async with AsyncSwarmClient(url) as client:
        running = asyncio.create_task(client.run_group(TASK, agent, 2))
        await asyncio.wait_for(started.wait(), PATIENCE_S)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await played.gateway.follower.wait_for(lambda _: not played.engine.open, PATIENCE_S)
    assert {closed.aborted for closed in played.engine.closed.values()} == {AbortReason.CLIENT}


async def test_async_runs_are_retried_too() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def always(task: Task) -> None:
        raise RuntimeError("no")

    async with AsyncSwarmClient("http://nowhere", verbose=False, sleep=sleep) as client:
        with pytest.raises(EpisodesFailed):
            await client.run_episodes_until_all_complete([TASK], always)
    assert len(slept) == 2
    assert slept[1] > slept[0]


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()], ids=["exit", "cancelled"])
async def test_whatever_a_run_raises_is_a_failure_of_that_run_alone(raised: BaseException) -> None:
    tasks = [Task(task_id=name) for name in ("good", "bad", "fine")]

    def run(task: Task) -> str:
        if task.task_id == "bad":
            raise raised
        return task.task_id

    async def run_async(task: Task) -> str:
        return run(task)

    for failed in (run, run_async):
        with SwarmClient("http://nowhere", verbose=False) as client, pytest.raises(EpisodesFailed) as caught:
            await asyncio.to_thread(client.run_episodes_until_all_complete, tasks, failed, auto_retry=False)
        assert caught.value.results == ["good", None, "fine"]
    async with AsyncSwarmClient("http://nowhere", verbose=False) as client_:
        with pytest.raises(EpisodesFailed) as caught:
            await client_.run_episodes_until_all_complete(tasks, run_async, auto_retry=False)
    assert caught.value.results == ["good", None, "fine"]
    assert list(caught.value.failures) == [1]


# ---- the transport --------------------------------------------------------------------------------------------


def test_a_broken_connection_is_retried_with_the_same_trace() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if len(seen) == 1:
            raise httpx.ConnectError("refused")
        if len(seen) == 2:
            return httpx.Response(503, json={"detail": "later", "code": "overloaded"}, headers={"Retry-After": "3"})
        return httpx.Response(200, json={"success": True})

    slept: list[float] = []
    client = SwarmClient("http://hive", transport_=httpx.MockTransport(handler), sleep=slept.append)
    with TracerProvider().get_tracer("an agent").start_as_current_span("its work") as span:
        client.abort_episode("e1")
    client.abort_episode("e2")
    assert slept[1] >= 3.0
    context = span.get_span_context()
    trace = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    *traced, untraced = seen
    assert {request.headers["traceparent"] for request in traced} == {trace}
    assert "traceparent" not in untraced.headers
    assert len({request.headers["idempotency-key"] for request in traced}) == 1


def test_a_server_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        SwarmClient("localhost:10086")


def test_an_agents_address_is_refused_with_that_of_the_hive() -> None:
    with pytest.raises(ValueError, match=r"own is http://hive:10086$"):
        SwarmClient("http://hive:10086/v1/")


async def test_an_engine_that_the_hive_does_not_have_is_asked_for(url: str) -> None:
    async with AsyncSwarmClient(url, engine="nosuch") as client:
        with pytest.raises(BadRequest, match=r"has no http://\S+/e/nosuch/claim_episodes .* have this engine"):
            await client.begin_episode()


def test_progress_is_one_line_that_counts() -> None:
    progress = ProgressBar(4, "episodes", shown=False)
    progress.step()
    progress.step(failed=True)
    assert "2/4 episodes, 1 failed" in progress.line()


@pytest.mark.parametrize("name", ["SwarmClient", "AsyncSwarmClient", "Job", "Task"])
def test_the_client_needs_no_server_library(name: str) -> None:
    script = f"""
import sys, bombus
assert "httpx" not in sys.modules and "pydantic" not in sys.modules, "import bombus is not lazy"
bombus.{name}
print([module for module in ("nats", "torch", "fastapi", "yaml", "transformers") if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
