"""`bombus rollout` and `bombus start` as processes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bombus.cli import main
from bombus.hive.events import AbortReason, EpisodeAborted, EpisodeEnded
from bombus.hive.generation import Generate
from tests.ctrl_c import heed_the_terminal
from tests.gateway.openai_hive import GatewayHive, Send, says
from tests.patience import until
from tests.rollout.hive import AGENT, JOB, repository, write_tasks
from tests.rollout.test_process import is_alive
from tests.rollout.test_rollout import called, events, hangs

OPENAI_AGENT = """
import os, sys
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": os.environ["BOMBUS_PROMPT"]}]
for turn in range(2):
    reply = client.chat.completions.create(model=os.environ["BOMBUS_MODEL"], messages=messages, max_tokens=16)
    answer = reply.choices[0].message.content
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
open("answer.txt", "w").write(messages[-2]["content"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tasks(tmp_path, {"prompt": "the quick", "task_id": "a"}, {"prompt": "brown fox", "task_id": "b"})
    repository(tmp_path)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def ignores_a_closed_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def bombus(
    folder: Path,
    *arguments: str,
    before: Callable[[], None] = heed_the_terminal,
    printed: int = asyncio.subprocess.PIPE,
    **variables: str,
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bombus",
        *arguments,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder / "tmp"), **variables},
        stdin=asyncio.subprocess.PIPE,
        stdout=printed,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=before,
    )


async def ended(process: asyncio.subprocess.Process, typed: str = "") -> tuple[int | None, str, str]:
    """Return the exit code of a command, what it printed and its errors."""
    try:
        async with asyncio.timeout(200):
            printed, errors = await process.communicate(typed.encode())
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, (printed or b"").decode(), errors.decode()


async def test_an_agent_of_openais_sdk_plays_episodes_with_one_command(served: GatewayHive, folder: Path) -> None:
    served.replica.scripts.extend([says("the weather"), says("ok")] * 2)
    write_tasks(folder, {"prompt": "the quick", "task_id": "a"})
    (folder / "repo" / "agent.py").write_text(OPENAI_AGENT)
    (folder / "job.yaml").write_text(json.dumps(JOB))
    rollout = await bombus(
        folder,
        *("rollout", "--task", "tasks.jsonl", "--workspace", "repo", "--url", served.base_url, "--job", "job.yaml"),
        *("--agent", f"{sys.executable} agent.py", "--reward", "./check.sh", "--concurrency", "1", "--out", "kept"),
    )
    code, printed, errors = await ended(rollout)
    assert code == 0, errors
    assert errors.startswith("bombus rollout: the job's batches have 2 different tasks (collection.batch_size)")
    starting, *episodes, summary = printed.splitlines()
    assert starting.startswith("starting the job of job.yaml")
    assert summary == "2 episodes, mean reward 0.750"
    assert len(episodes) == 2, "as many as the job's num_repeat"
    assert all(re.fullmatch(r"a main-1-\d: reward 0\.75 \(\d+ s, 2 calls, \d+ tokens\)", line) for line in episodes)
    records = [json.loads(line) for line in (folder / "kept" / "episodes.jsonl").read_text().splitlines()]
    assert [(record["task_id"], record["reward"], record["calls"]) for record in records] == [("a", 0.75, 2)] * 2
    ends = await events(served.bus, EpisodeEnded, 2)
    assert [end.outcomes[0].reward for end in ends] == [0.75] * 2


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_ctrl_c_stops_the_agents_aborts_their_episodes_and_leaves_nothing(
    served: GatewayHive, folder: Path, number: signal.Signals, exit_code: int
) -> None:
    served.replica.scripts.extend([says("ok"), hangs, hangs])
    rollout = await bombus(
        folder,
        *("rollout", "--task", "tasks.jsonl", "--workspace", "repo", "--url", served.base_url, "--out", "kept"),
        *("--agent", f"sh -c 'echo $$; exec {AGENT} x 2'", "--reward", "./check.sh", "-n", "2", "--concurrency", "2"),
    )
    await called(served, 3)
    rollout.send_signal(number)
    code, printed, errors = await ended(rollout)
    assert code == exit_code
    assert printed == "0 episodes, mean reward -\n"
    assert "Traceback" not in errors
    await served.until(lambda engine: not engine.open)
    (aborted,) = await events(served.bus, EpisodeAborted)
    assert (aborted.reason, aborted.detail) == (AbortReason.CLIENT, "the rollout was stopped")
    assert not list((folder / "tmp").iterdir())
    agents = [int(path.read_text().split()[0]) for path in (folder / "kept" / "outputs").iterdir()]
    assert len(agents) == 2
    assert not any(is_alive(agent) for agent in agents)


async def test_a_second_ctrl_c_kills_agents_that_do_not_end_when_they_are_asked_to(
    served: GatewayHive, folder: Path
) -> None:
    rollout = await stubborn(served, folder)
    rollout.send_signal(signal.SIGINT)
    await asyncio.sleep(1)
    with suppress(ProcessLookupError):  # a slow machine: it has killed its agent after its patience, and ended
        rollout.send_signal(signal.SIGINT)
    await ended(rollout)
    await until_gone(folder)


async def test_a_rollout_under_nohup_goes_on_when_its_terminal_is_closed(served: GatewayHive, folder: Path) -> None:
    closed = asyncio.Event()

    async def waits(request: Generate, send: Send) -> None:
        await closed.wait()
        await says("ok")(request, send)

    served.replica.scripts.append(waits)
    arguments = ("--task", "tasks.jsonl", "--workspace", "repo", "--url", served.base_url, "-n", "1", "--eval")
    rollout = await bombus(
        folder,
        *("rollout", *arguments, "--agent", f"{AGENT} x 1", "--reward", "./check.sh", "--concurrency", "1"),
        before=ignores_a_closed_terminal,
    )
    await called(served, 1)
    rollout.send_signal(signal.SIGHUP)
    closed.set()
    code, printed, errors = await ended(rollout)
    assert code == 0, errors
    assert printed.splitlines()[-1].startswith("2 episodes")


async def test_a_rollout_goes_on_when_nobody_reads_what_it_prints(served: GatewayHive, folder: Path) -> None:
    reading, writing = os.pipe()
    arguments = ("--task", "tasks.jsonl", "--workspace", "repo", "--url", served.base_url, "-n", "2", "--eval")
    rollout = await bombus(
        folder,
        *("rollout", *arguments, "--agent", f"{AGENT} x 1", "--reward", "./check.sh", "--out", "kept"),
        printed=writing,
    )
    os.close(writing)
    os.close(reading)
    code, _, errors = await ended(rollout)
    assert (code, errors) == (0, "")
    assert len((folder / "kept" / "episodes.jsonl").read_text().splitlines()) == 4


INTERRUPTED_IMPORT = """
import os, signal, sys
from bombus.cli import main

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == "bombus.commands.rollout":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
sys.exit(main(["rollout", "--help"]))
"""


def test_ctrl_c_while_a_command_is_imported_is_no_traceback() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


async def test_a_rollout_that_is_killed_goes_on_where_it_was_when_it_is_started_again(
    served: GatewayHive, folder: Path
) -> None:
    write_tasks(folder, *({"prompt": "the quick", "task_id": name} for name in "abcd"))
    served.replica.scripts.extend([says("ok"), says("ok"), hangs])

    async def rollout() -> asyncio.subprocess.Process:
        return await bombus(
            folder,
            *("rollout", "--task", "tasks.jsonl", "--workspace", "repo", "--url", served.base_url, "--out", "kept"),
            *("--agent", f"{AGENT} x 1", "--reward", "./check.sh", "-n", "1", "--concurrency", "1", "--eval"),
        )

    killed = await rollout()
    await called(served, 3)
    killed.kill()
    await killed.wait()
    code, printed, errors = await ended(await rollout())
    assert (code, errors) == (0, "")
    assert printed.splitlines()[-1].startswith("2 episodes"), "the one that was open, and the one that was left"
    played = [json.loads(line)["task_id"] for line in (folder / "kept" / "episodes.jsonl").read_text().splitlines()]
    assert sorted(played) == ["a", "b", "c", "d"]
    assert sorted(end.outcomes[0].task for end in await events(served.bus, EpisodeEnded, 4)) == sorted(played)


async def test_agents_end_with_a_rollout_that_is_killed(served: GatewayHive, folder: Path) -> None:
    rollout = await stubborn(served, folder)
    rollout.kill()
    await until_gone(folder)
    await rollout.wait()


async def stubborn(served: GatewayHive, folder: Path) -> asyncio.subprocess.Process:
    """Start a rollout of an agent that ignores the request to end, and wait until it has written its pid."""
    pid, written = folder / "pid", folder / "agent"
    rollout = await bombus(
        folder,
        *("rollout", "--task", "tasks.jsonl", "--workspace", "repo", "--url", served.base_url, "-n", "1"),
        *("--agent", f"sh -c 'trap \"\" TERM; echo $$ > {pid}; mv {pid} {written}; while :; do sleep 0.1; done'"),
        *("--reward", "./check.sh", "--concurrency", "1"),
    )
    await until(written.exists)
    return rollout


async def until_gone(folder: Path) -> None:
    """Wait for less time than an agent has to end."""
    async with asyncio.timeout(4):
        while is_alive(int((folder / "agent").read_text())):
            await asyncio.sleep(0.05)


async def session(folder: Path, served: GatewayHive) -> asyncio.subprocess.Process:
    """Start a small agent that is called like a harness."""
    (folder / "bin").mkdir()
    (folder / "bin" / "qwen").write_text(f'#!/bin/sh\nexec {AGENT} "$@"\n')
    (folder / "bin" / "qwen").chmod(0o755)
    return await bombus(
        folder,
        *("start", "--workspace", "repo", "--url", served.base_url, "--task-id", "mine", "qwen", "hello", "2"),
        PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
    )


async def harness(folder: Path, served: GatewayHive, typed: str) -> tuple[int | None, str, str]:
    """Run a session, and type something when its harness has ended."""
    return await ended(await session(folder, served), typed)


async def test_a_session_by_hand_is_one_episode_whose_reward_is_asked_for(served: GatewayHive, folder: Path) -> None:
    code, printed, errors = await harness(folder, served, "good\n1e300\n0.5\n")
    assert (code, errors) == (0, "")
    assert "2 model calls" in printed
    assert "good is not a number" in printed
    assert "1e300 is not a number whose absolute value is at most 1e+09" in printed
    assert printed.endswith("the episode ended with the reward 0.5\n")
    (end,) = await events(served.bus, EpisodeEnded)
    (outcome,) = end.outcomes
    assert (outcome.task, outcome.reward, outcome.metadata) == (
        "mine",
        0.5,
        {"agent": "qwen", "exit_code": 0, "task_id": "mine"},
    )
    assert (folder / "repo" / "answer.txt").read_text() == "ok", "it works in the folder itself"
    assert not list((folder / "tmp").iterdir())


async def test_a_session_without_a_reward_is_aborted(served: GatewayHive, folder: Path) -> None:
    code, printed, _ = await harness(folder, served, "\n")
    assert code == 0
    assert printed.endswith("the episode was aborted\n")
    (aborted,) = await events(served.bus, EpisodeAborted)
    assert aborted.detail == "the session got no reward"


async def test_a_session_whose_terminal_is_closed_ends_its_episode(served: GatewayHive, folder: Path) -> None:
    served.replica.scripts.append(hangs)
    start = await session(folder, served)
    await called(served, 1)
    start.send_signal(signal.SIGHUP)
    code, _, errors = await ended(start)
    assert (code, errors) == (129, "")
    (aborted,) = await events(served.bus, EpisodeAborted)
    assert aborted.detail == "the session was interrupted"


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (("--workspace", "none"), "--workspace none is not a folder"),
        (("--task-id", "x" * 513), "--task-id has over 512 characters"),
        (("--task-id", "\udce9"), "--task-id '\\udce9' has bytes that are not UTF-8"),
    ],
)
def test_a_session_that_could_not_be_played_is_refused_before_it_claims(
    capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], why: str
) -> None:
    assert main(["start", "--url", "http://no.test", *typed, "qwen"]) == 2
    assert capsys.readouterr().err.startswith(f"bombus start: {why}")


async def test_steps_that_the_tasks_can_never_make_are_refused(served: GatewayHive, folder: Path) -> None:
    write_tasks(folder, {"prompt": "the quick"})
    rollout = await bombus(
        folder,
        *("rollout", "--task", "tasks.jsonl", "--url", served.base_url, "--agent", "true", "--reward", "true"),
        *("--steps", "3"),
    )
    code, printed, errors = await ended(rollout)
    assert (code, printed) == (1, "")
    assert "but --task has 1" in errors
    assert not served.engine.open
