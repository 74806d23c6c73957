"""`bombus up` with all of its processes, driven from outside as a user would."""

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError

from bombus import Job, SwarmClient, Task, WorkflowOutput
from bombus.bus import Bus, Reader
from bombus.bus_address import without_login
from bombus.hive import events as ev
from bombus.machine.process import free_port
from tests.effort import long_only
from tests.patience import wait_until

ROOT = Path(__file__).parents[2]
READY_S = 120.0
EXAMPLE_S = 150.0


class Up:
    """A running `bombus up`. `ready` is the line that it printed once it was ready, and `log` its log."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "up.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bombus", "up", "--port", str(free_port()), "--data-dir", str(folder / "data"),
                 "--threads", "1", *arguments],
                stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env={**os.environ, "BOMBUS_CACHE": str(folder.parent / "cache")},
            )  # fmt: skip
        self.url = self._ready()

    def _ready(self) -> str:
        assert self.process.stdout is not None
        timer = threading.Timer(READY_S, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith("ready "):
                    self.ready = line
                    return line.split()[1]
        finally:
            timer.cancel()
        raise AssertionError(f"bombus up did not become ready:\n{self.log.read_text()}")

    def services(self, name: str) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if child.cmdline()[1:4] == ["-m", "bombus", name]]

    @property
    def nats(self) -> str:
        return (self.folder / "data/nats-url").read_text().strip()

    def interrupt(self) -> list[psutil.Process]:
        """Press Ctrl-C. Returns those of its processes that are still there afterwards."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        assert family
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=10)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("hive"), "--gateways", "2", "--coordinators", "2")
    yield running
    assert running.interrupt() == [], "Ctrl-C leaves no process running"
    log = running.log.read_text()
    assert "stopping the services in order; the log is kept. Press Ctrl-C again to kill them" in log
    assert "waiting for a job: engine main is offline until it is started" in log
    assert "standing by: another coordinator leads hive main" in log


def example(up: Up, name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, name, "--url", up.url, *arguments],
        cwd=ROOT / "examples", capture_output=True, text=True, timeout=EXAMPLE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\n{up.log.read_text()[-4000:]}"
    return done.stdout


def status_of(up: Up, *options: str) -> str:
    command = [sys.executable, "-m", "bombus", "status", "--nats", up.nats, "--hive", "main", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def stop(up: Up) -> None:
    with SwarmClient(up.url) as client:
        client.stop_engine()


def test_a_hive_trains_a_model_through_every_service_and_serves_the_new_weights(up: Up) -> None:
    with SwarmClient(up.url) as client:
        assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
        job = Job(model="tiny", batch_size=2, num_repeat=4, lr=1e-3, bombus=FRESH)
        client.auto_sync_train_config_and_start_engine(job)
        tasks = [Task(task_id="a", main_query="a="), Task(task_id="b", main_query="b=")]

        def agent(task: Task, credentials: "object") -> WorkflowOutput:
            model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)  # type: ignore[attr-defined]
            messages = [{"role": "user", "content": task.main_query}]
            reply = model.chat.completions.create(model="any", messages=messages, max_tokens=4, logprobs=True)  # type: ignore[arg-type]
            assert reply.choices[0].logprobs is not None
            return WorkflowOutput(reward=float((reply.choices[0].message.content or "").count(task.task_id)))

        for _ in range(2):
            client.run_episodes_until_all_complete(tasks, lambda task: client.run_group(task, agent, 4))
        wait_until(lambda: client.get_global_step() == 2)  # when all episodes have ended, it may still be ROLLING
        client.wait_for_status("ENGINE.ROLLING")
        (engine,) = json.loads(status_of(up, "--json"))["engines"]
        assert len(engine["formats"]) == 1, "both gateways read the model in the same way"
        episode, credentials = client.begin_episode(episode_type="eval")
        agent(tasks[0], credentials)
        client.end_episode(tasks[0], episode, WorkflowOutput(reward=0.5))
        late = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key, max_retries=0)
        with pytest.raises(PermissionDeniedError, match="has been ended"):
            late.chat.completions.create(model="any", messages=[{"role": "user", "content": "c="}], max_tokens=2)
        forged = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key[:-2] + "xx", max_retries=0)
        with pytest.raises(AuthenticationError):
            forged.chat.completions.create(model="any", messages=[{"role": "user", "content": "c="}], max_tokens=2)
    stop(up)


LENGTHS = {
    "max_prompt_length": 256,
    "max_response_length": 200,
    "max_response_length_in_one_turn": 64,
    "max_model_len": 512,
}
FRESH: dict[str, dict[str, Any]] = {"rollout": LENGTHS, "trainer": {"resume": "never"}}


def test_an_asynchronous_run_samples_while_it_trains_and_no_sample_is_too_stale(up: Up) -> None:
    bombus = {**FRESH, "collection": {"max_staleness": 1}}
    job = Job(model="tiny", batch_size=2, num_repeat=4, lr=1e-3, bombus=bombus)
    numbers = itertools.count()

    def play(client: SwarmClient, until_step: int) -> None:
        while client.get_global_step() < until_step:
            task = f"t{next(numbers) // 4}"
            episode, credentials = client.begin_episode()
            model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)
            messages = [{"role": "user", "content": "a="}]
            reply = model.chat.completions.create(model="any", messages=messages, max_tokens=48)  # type: ignore[arg-type]
            reward = float((reply.choices[0].message.content or "").count("a"))
            client.end_episode(Task(task_id=task, main_query=""), episode, WorkflowOutput(reward=reward))

    with SwarmClient(up.url) as client:
        client.auto_sync_train_config_and_start_engine(job)
        for until_step in range(6, 61, 6):  # on a busy machine a step may be over before an episode ends beside it
            with ThreadPoolExecutor(8) as players:
                for played in [players.submit(play, client, until_step) for _ in range(8)]:
                    played.result(timeout=EXAMPLE_S)
            run = asyncio.run(newest_run(up))
            if ended_while_training(run):
                break
        assert client.get_engine_status()[0] == "ENGINE.ROLLING"
    assert ended_while_training(run) > 0
    steps = [event.metrics for event in run if isinstance(event, ev.StepCompleted)]
    assert len(steps) >= 6
    assert max(metrics["staleness_max"] for metrics in steps) == 1, "some were sampled one version before, none two"
    assert all(metrics["episodes_left_out"] == 0 for metrics in steps)
    assert not any(isinstance(event, ev.RollingClosed | ev.SyncingStarted) for event in run)
    stop(up)


def ended_while_training(run: list[ev.AnyEvent]) -> int:
    """Return how many episodes ended between a batch and the step that it was for."""
    training = ended = 0
    for event in run:
        training += isinstance(event, ev.BatchReady) - isinstance(event, ev.StepCompleted)
        ended += training > 0 and isinstance(event, ev.EpisodeEnded)
    return ended


async def newest_run(up: Up) -> list[ev.AnyEvent]:
    """Return the events since the engine was last started."""
    found: list[ev.AnyEvent] = []
    async with await Bus.connect(up.nats, "main") as bus:
        newest = await bus.last(bus.subjects.events_stream)
        assert newest is not None
        position = 0
        async with Reader(bus, bus.subjects.events_stream, start_seq=1) as reader:
            while position < newest.seq:
                for stored in await reader.read():
                    position = stored.seq
                    event = ev.decode_event(stored.data)
                    found = [] if isinstance(event, ev.EngineStarted) else [*found, event]
    return found


def test_the_weights_of_a_step_load_with_transformers(up: Up) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example(up, "arithmetic_agent.py", "--model", "tiny", "--steps", "1")
    stop(up)
    newest = max((up.folder / "data/engines").rglob("model.safetensors"), key=lambda path: path.stat().st_mtime)
    model = AutoModelForCausalLM.from_pretrained(newest.parent)
    tokens = AutoTokenizer.from_pretrained(newest.parent)("a=", return_tensors="pt")
    assert model(**tokens).logits.shape[-1] == model.config.vocab_size


def test_the_arithmetic_agent_runs(up: Up) -> None:
    assert "step 1: mean reward" in example(up, "arithmetic_agent.py", "--model", "tiny", "--steps", "2")
    stop(up)


@long_only
def test_the_tool_agent_runs_with_the_model_that_comes_with_bombus(up: Up) -> None:
    assert "step 0: What is" in example(up, "tool_agent.py", "--steps", "1")
    stop(up)


def test_solvers_rewriters_and_a_selector_are_trained_together(up: Up) -> None:
    printed = example(up, "solve_rewrite_select.py", "--model", "tiny", "--steps", "1")
    assert re.search(r"step 0: [0-4] of 4 right", printed)
    stop(up)


def test_an_example_of_engines_that_the_hive_does_not_have_says_so_in_a_sentence_for_each(up: Up) -> None:
    command = [sys.executable, "planner_worker.py", "--url", up.url]
    done = subprocess.run(command, cwd=ROOT / "examples", capture_output=True, text=True, timeout=EXAMPLE_S)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    missing = [f"{up.url}/e/{name}/get_engine_status" for name in ("planner", "worker")]
    expected = [f"planner_worker.py: The server has no {address}" for address in missing]
    assert [line.partition(" (")[0] for line in sorted(lines)] == expected


def test_the_debug_client_completes_no_episode(up: Up) -> None:
    example(up, "debug_client.py", "--model", "tiny", "--steps", "1")
    with SwarmClient(up.url) as client:
        assert client.get_rollout_stat().completed_episodes == 0
    stop(up)


def test_two_clients_share_an_engine_in_the_cocktail_and_add_to_the_steps_of_others(up: Up) -> None:
    assert "from step 0 to step 1\n" in example(up, "cocktail.py", "--model", "tiny", "--steps", "1")
    again = example(up, "cocktail.py", "--model", "tiny", "--steps", "1")
    first, last = map(int, re.findall(r"from step (\d+) to step (\d+)", again)[0])
    assert last == first + 1 > 1
    assert {line.split(":")[0] for line in again.splitlines()[1:]} == {"adding", "counting"}
    stop(up)


def test_the_readmes_program_runs(up: Up, tmp_path: Path) -> None:
    program = (ROOT / "examples/readme.py").read_text()
    fresh = 'Job(experiment_name="readme", '
    for written, here in {"http://127.0.0.1:10086": up.url, "range(20)": "range(8)", "Job(": fresh}.items():
        assert written in program
        program = program.replace(written, here)
    (tmp_path / "readme.py").write_text(program)
    done = subprocess.run([sys.executable, tmp_path / "readme.py"], capture_output=True, text=True, timeout=EXAMPLE_S)
    assert done.returncode == 0, done.stderr
    rewards = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(rewards) == 8
    assert max(rewards[-2:]) > rewards[0] + 0.1, "it visibly learns"
    stop(up)


def test_a_program_for_another_model_is_told_the_difference_and_how_to_stop_the_job(up: Up) -> None:
    with SwarmClient(up.url) as client:
        client.auto_sync_train_config_and_start_engine(Job(model="tiny", bombus=FRESH))
    command = [sys.executable, "debug_client.py", "--url", up.url, "--model", "smollm2"]
    refused = subprocess.run(command, cwd=ROOT / "examples", capture_output=True, text=True, timeout=EXAMPLE_S)
    assert refused.returncode == 1
    assert "model.path is 'tiny', not 'smollm2'" in refused.stderr
    assert "`bombus stop`" in refused.stderr
    assert "Traceback" not in refused.stderr
    stopping = [sys.executable, "-m", "bombus", "stop", "--nats", up.nats, "--hive", "main"]
    lines = [subprocess.run(stopping, capture_output=True, text=True, timeout=60).stdout for _ in range(2)]
    assert lines == ["engine main is stopped at step 0; its log, weights and checkpoints are kept\n",
                    "engine main is not running a job\n"]  # fmt: skip
    with SwarmClient(up.url) as client:
        assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
    unknown = subprocess.run([*stopping, "--engine", "other"], capture_output=True, text=True, timeout=60)
    assert (unknown.returncode, unknown.stderr) == (
        2, "bombus stop: hive main has no engine other; its engines are: main\n"
    )  # fmt: skip


def test_an_example_says_how_to_start_a_hive_and_shows_no_traceback() -> None:
    command = [sys.executable, "arithmetic_agent.py", "--url", f"http://127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, cwd=ROOT / "examples", stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()  # printed at once, before it waits for two minutes
        process.kill()
    assert re.fullmatch(r"waiting for http://127\.0\.0\.1:\d+, up to 120 s: start it with `bombus up`\n", line)


def test_status_shows_what_a_hive_does_as_text_and_as_json(up: Up) -> None:
    assert up.ready == f"ready {up.url} (NATS at {without_login(up.nats)})\n"
    assert "engine main" in status_of(up)
    data = json.loads(status_of(up, "--json"))
    assert "main" in json.dumps(data)
    assert {name: stream["max_bytes"] for name, stream in data["streams"].items()} == {
        "inbox": 256 << 20,
        "events": 1 << 30,
        "calls": 4 << 30,
        "ops": 1 << 30,
        "trajectories": 2 << 30,
        "blobs": 2 << 30,
    }
    assert re.search(r"^  events .* of 1\.1 GB, 1 replica$", status_of(up), re.MULTILINE)


def test_services_that_die_are_restarted_and_the_hive_continues(up: Up) -> None:
    for name in ("coordinator", "gateway"):
        before = up.services(name)
        for each in before:
            each.kill()
        psutil.wait_procs(before, timeout=10)
        with SwarmClient(up.url) as client:  # its commands wait for a coordinator and a gateway
            client.sync_train_config(Job(model="tiny"))
        assert {each.pid for each in up.services(name)}.isdisjoint({each.pid for each in before})


def test_an_unmodified_sdk_with_one_base_url_survives_the_death_of_the_gateway_that_serves_it(up: Up) -> None:
    with SwarmClient(up.url) as client:
        client.auto_sync_train_config_and_start_engine(Job(model="tiny", bombus=FRESH))
        episode, credentials = client.begin_episode()
        model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key, max_retries=5)
        messages = [{"role": "user", "content": "a="}]
        for _ in range(2):
            reply = model.chat.completions.create(model="any", messages=messages, max_tokens=4)  # type: ignore[arg-type]
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": "b="}]
            serving = connected_gateway(up)  # over a connection that the SDK keeps open
            serving.kill()
            serving.wait(10)
        reply = model.chat.completions.create(model="any", messages=messages, max_tokens=4)  # type: ignore[arg-type]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens > 8, "the prompt contains the turns before"
        client.end_episode(Task(task_id="t", main_query=""), episode, WorkflowOutput(reward=1.0))
        assert client.get_rollout_stat().completed_episodes == 1
    stop(up)


def connected_gateway(up: Up) -> psutil.Process:
    """Return a gateway that this process has a connection to."""
    port = int(up.url.rsplit(":", 1)[1])
    ours = {
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.raddr and connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    }
    for gateway in up.services("gateway"):
        if any(connection.raddr and connection.raddr.port in ours for connection in gateway.net_connections("tcp")):
            return gateway
    raise AssertionError("no gateway has a connection to us")


def test_a_cluster_file_starts_its_engines_and_their_jobs_and_port_0_is_one_that_is_free(tmp_path: Path) -> None:
    tiny = {"bombus": {"model": {"path": "tiny"}, "rollout": LENGTHS}}
    file = tmp_path / "cluster.yaml"
    engines = {"near": {"job": tiny, "trainer": {}, "inference": [{"kv_cache_mb": 64}]}, "far": {}}
    file.write_text(json.dumps({"hive": "lab", "engines": engines}))
    up = Up(tmp_path, "--config", str(file), "--port", "0")
    try:
        check_port_0(up)
        with SwarmClient(f"{up.url}/e/near") as client:
            client.wait_for_status("ENGINE.ROLLING", timeout_s=READY_S)
        with SwarmClient(f"{up.url}/e/far") as client:
            assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
        assert [len(up.services(kind)) for kind in ("coordinator", "trainer", "inference", "gateway")] == [1, 1, 1, 1]
        up.services("gateway")[0].suspend()  # which ends only when it is killed
        up.process.send_signal(signal.SIGINT)
        wait_until(lambda: "waiting for gateway to end its open calls, for 18 s at most" in up.log.read_text())
    finally:
        assert up.interrupt() == []
    assert "killing all services" in up.log.read_text()
    assert "did not stop within" not in up.log.read_text(), "nothing is waited for any longer"


def check_port_0(up: Up) -> None:
    """The port that was found is printed, and kept by gateways that come later."""
    port = int(up.url.rpartition(":")[2])
    assert port != 0
    assert httpx.get(f"{up.url}/health").json()["status"] == "healthy"
    (gateway,) = up.services("gateway")
    words = gateway.cmdline()
    assert words[words.index("--port") + 1] == str(port)
    gateway.kill()
    gateway.wait(10)
    transport = httpx.HTTPTransport(retries=20)  # the next one listens at the same port
    with httpx.Client(transport=transport, timeout=60) as client:
        assert client.get(f"{up.url}/health").status_code in (200, 503)


@long_only
def test_a_planner_and_a_worker_on_two_engines_train_together(tmp_path: Path) -> None:
    up = Up(tmp_path, "--config", str(ROOT / "examples/server/planner_worker.yaml"))
    try:
        told = example(up, "planner_worker.py", "--model", "tiny", "--steps", "2")
        lines = [rf"step {step}: planner \d\.\d{{3}}, worker \d\.\d{{3}}" for step in range(2)]
        assert re.fullmatch("\n".join(lines) + "\n", told), told
        for engine in ("planner", "worker"):
            with SwarmClient(up.url, engine=engine) as client:
                wait_until(lambda: client.get_global_step() == 2, READY_S)
        events = asyncio.run(newest_run(up))
        claimed = [event for event in events if isinstance(event, ev.EpisodeClaimed)]
        assert {(event.engine, *event.partners) for event in claimed} == {("planner", "worker"), ("worker", "planner")}
        ended = {
            engine: [
                outcome.digest
                for event in events
                if isinstance(event, ev.EpisodeEnded) and event.engine == engine
                for outcome in event.outcomes
            ]
            for engine in ("planner", "worker")
        }
        assert ended["planner"] == ended["worker"], "each report is the end of an episode on both engines"
        assert len(ended["planner"]) == 16
    finally:
        assert up.interrupt() == []


@long_only
def test_a_trainer_that_is_stopped_is_killed_and_its_successor_trains_the_batch_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"engines": {"main": {"trainer": {"stall_s": 12.0}, "inference": [{}]}}}))
    up = Up(tmp_path, "--config", str(file))
    try:
        with SwarmClient(up.url) as client:
            job = Job(model="tiny", batch_size=1, num_repeat=2, lr=1e-3, bombus={"rollout": LENGTHS})
            client.auto_sync_train_config_and_start_engine(job)
            client.wait_for_status("ENGINE.ROLLING", timeout_s=READY_S)
            (stopped,) = up.services("trainer")
            stopped.suspend()
            for reward in (0.0, 1.0):
                episode, credentials = client.begin_episode()
                model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)
                messages = [{"role": "user", "content": "a="}]
                model.chat.completions.create(model="any", messages=messages, max_tokens=4)  # type: ignore[arg-type]
                client.end_episode(Task(task_id="a", main_query=""), episode, WorkflowOutput(reward=reward))
            wait_until(lambda: client.get_global_step() == 1, 2 * READY_S)
            client.wait_for_status("ENGINE.ROLLING", timeout_s=2 * READY_S)
        assert not stopped.is_running()
        run = asyncio.run(newest_run(up))
        assert len([event for event in run if isinstance(event, ev.StepCompleted)]) == 1
        assert len([event for event in run if isinstance(event, ev.TrainerOpened)]) == 2
        stalled = [event for event in run if isinstance(event, ev.TrainerStalled)]
        assert all(event.silent for event in stalled)
        assert len(stalled) <= 1, "on a machine whose bus is away for seconds, silence is not judged"
        assert "trainer main has been silent for 12 s: killing it" in up.log.read_text()
    finally:
        assert up.interrupt() == []


def limits_of(up: Up) -> dict[str, int]:
    streams = json.loads(status_of(up, "--json"))["streams"]
    return {name: stream["max_bytes"] for name, stream in streams.items()}


@long_only
def test_the_limits_of_streams_are_set_by_flags_and_changed_by_the_same_flags(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"engines": {"main": {}}, "streams": {"events_bytes_max": "100MB"}}))
    up = Up(tmp_path, "--config", str(file), "--calls-bytes-max", "200MB", "--inbox-bytes-max", "50MB")
    try:
        first = {"inbox": 50_000_000, "events": 100_000_000, "calls": 200_000_000}
        first |= {"ops": 1 << 30, "trajectories": 2 << 30, "blobs": 2 << 30}
        assert limits_of(up) == first
    finally:
        assert up.interrupt() == []
    up = Up(tmp_path, "--config", str(file), "--calls-bytes-max", "300MB")
    try:
        assert limits_of(up) == first | {"calls": 300_000_000}
        told = subprocess.run(
            [sys.executable, "-m", "bombus", "doctor", "--config", str(file), "--data-dir", str(up.folder / "data"),
             "--events-bytes-max", "1GB"],
            capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip
        assert re.search(r"^ok +nats +127.0.0.1:\d+ answers and takes messages of up to 8.4 MB$", told, re.MULTILINE)
        assert re.search(r"^ok +stream events +.* of 100 MB, 1 replica; 1.0 GB after a restart$", told, re.MULTILINE)
        assert re.search(r"^ok +stream calls +.* of 300 MB, 1 replica$", told, re.MULTILINE)
    finally:
        assert up.interrupt() == []
    with pytest.raises(AssertionError, match=r"too little storage left .* --blobs-bytes-max\) or give the server more"):
        Up(tmp_path, "--config", str(file), "--blobs-bytes-max", "900TB")


def test_bad_arguments_are_refused_with_a_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "job.yaml"
    bad.write_text("ajet: {rollout: {num_repeat: -1}}")
    for arguments, words in ((["--hive", "No Good"], "hive"), (["--config", str(bad)], "num_repeat")):
        done = subprocess.run(
            [sys.executable, "-m", "bombus", "up", *arguments], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert re.search(words, done.stderr)


@pytest.mark.parametrize(
    "command", ["up --data-dir data", "env serve bombus.tasks.aws.environment:AwsEnvironment", "inference", "gateway"]
)
def test_a_port_that_another_program_has_is_named_in_a_sentence(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "bombus", *command.split(), "--port", str(port)],
            capture_output=True, text=True, timeout=60, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode not in (0, -signal.SIGKILL)
    assert f"cannot listen at 127.0.0.1:{port}: [Errno 98] Address already in use; choose another --port" in done.stderr
    assert "Traceback" not in done.stderr
