"""The process of the command line by itself: what it could reach if a command came through that should not."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("ministack")
pytest.importorskip("awscli")

from bombus.environments.backends.process import SimulatorProcess, ministack
from bombus.environments.backends.shell import NAMESPACES
from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import EnvironmentLost
from bombus.tasks.aws.commands import words_of_command
from bombus.tasks.aws.console import COMMAND_S, AwsConsole, CommandKilled
from bombus.tasks.aws.worker import MEMORY_BYTES_MAX


@pytest.fixture
async def simulator() -> AsyncIterator[SimulatorProcess]:
    backend = ministack(0, 0)
    await backend.start()
    yield backend
    await backend.stop()


@pytest.fixture
async def console(simulator: SimulatorProcess) -> AsyncIterator[AwsConsole]:
    made = AwsConsole(simulator.address)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def isolated(console: AwsConsole) -> AwsConsole:
    if sys.platform != "linux" or subprocess.run(["unshare", *NAMESPACES, "true"], check=False).returncode:
        pytest.skip("this kernel allows no namespaces")
    assert console.is_isolated
    return console


class Listener:
    """A server on this machine that counts who connects to it."""

    def __init__(self) -> None:
        self.connections = 0
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made = Listener()
    await made.start()
    yield made
    made.close()


async def test_a_command_that_is_cancelled_costs_its_process_and_the_next_one_has_a_new_one(
    console: AwsConsole,
) -> None:
    first = console.pid
    running = asyncio.create_task(console.run(["s3", "mb", "s3://one"]))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert console.pid is None
    assert await console.run(["s3", "mb", "s3://two"]) == (0, "make_bucket: two")
    assert console.pid not in (None, first)


async def test_a_closed_console_carries_out_nothing_and_starts_nothing(simulator: SimulatorProcess) -> None:
    console = AwsConsole(simulator.address)
    starting = asyncio.create_task(console.start())
    await asyncio.sleep(0)
    await console.close()
    with pytest.raises(EnvironmentLost, match="is closed"):
        await starting
    with pytest.raises(EnvironmentLost, match="is closed"):
        await console.run(["s3", "ls"])
    assert console.pid is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads the variables of a process from /proc")
async def test_the_process_has_no_variable_of_ours(
    simulator: SimulatorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "OPENAI_API_KEY", "BOMBUS_ADMIN_KEY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "of-the-host")
    console = AwsConsole(simulator.address)
    await console.start()
    try:
        variables = Path(f"/proc/{console.pid}/environ").read_text().split("\0")
        assert not [each for each in variables if "of-the-host" in each]
        assert {each.partition("=")[0] for each in variables if each} == {
            "PATH", "PYTHONPATH", "LANG", "HOME", "TMPDIR", "AWS_CONFIG_FILE", "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED", "AWS_PAGER", "NO_PROXY",
        }  # fmt: skip
        assert "AWS_ACCESS_KEY_ID=simulated" in variables
    finally:
        await console.close()


async def test_a_value_that_is_an_address_is_stored_and_not_fetched(console: AwsConsole, listener: Listener) -> None:
    value = f"{listener.address}/x"
    for words in (
        words_of_command(f"aws ssm put-parameter --name address --type String --value {value}"),
        words_of_command("aws ssm get-parameter --name address --query Parameter.Value"),
    ):
        code, text = await console.run(words)
        assert code == 0, text
    assert (text, listener.connections) == (f'"{value}"', 0)


async def test_a_region_holds_for_its_command_alone(console: AwsConsole) -> None:
    for line in ("--region eu-west-1 sqs create-queue --queue-name there", "sqs create-queue --queue-name here"):
        code, text = await console.run(words_of_command(f"aws {line}"))
        assert code == 0, text
    _, text = await console.run(words_of_command("aws sqs list-queues --query QueueUrls --output text"))
    assert [url.rpartition("/")[2] for url in text.split()] == ["here"]


async def test_a_queue_at_another_address_is_asked_of_the_simulator(console: AwsConsole, listener: Listener) -> None:
    line = f"aws sqs purge-queue --queue-url {listener.address}/000000000000/jobs"
    code, _ = await console.run(words_of_command(line))
    assert (code != 0, listener.connections) == (True, 0)


async def test_output_without_end_is_cut(console: AwsConsole) -> None:
    growing = "|".join(["[@,@]"] * 16)
    code, text = await console.run(words_of_command(f"aws sts get-caller-identity --query '{growing}'"))
    assert (code, text.endswith("(the output was cut)")) == (0, True)


def test_a_command_is_killed_before_the_time_of_its_tool_is_over() -> None:
    assert RolloutBudgets().tool_s > COMMAND_S


async def test_a_command_that_does_not_end_is_killed_and_the_next_one_has_a_new_process(
    simulator: SimulatorProcess,
) -> None:
    console = AwsConsole(simulator.address, command_s=3.0)
    await console.start()
    try:
        first = console.pid
        growing = "|".join(["[@[],@[]][]"] * 30)
        with pytest.raises(CommandKilled, match="did not end within 3 s"):
            await console.run(words_of_command(f"aws sts get-caller-identity --query 'values(@)|{growing}'"))
        assert await console.run(words_of_command("aws s3 mb s3://logs")) == (0, "make_bucket: logs")
        assert console.pid != first
    finally:
        await console.close()


async def test_files_of_this_machine_are_not_there(isolated: AwsConsole, tmp_path: Path) -> None:
    secret, written = tmp_path / "secret", tmp_path / "written"
    secret.write_text("of the host")
    assert (await isolated.run(["s3", "mb", "s3://logs"]))[0] == 0
    for words in (
        ["s3", "cp", str(secret), "s3://logs/x"],
        ["s3", "cp", "/etc/passwd", "s3://logs/x"],
        ["s3", "cp", str(tmp_path), "s3://logs/", "--recursive"],
        ["ssm", "put-parameter", "--name", "a", "--type", "String", "--value", f"file://{secret}"],
    ):
        code, text = await isolated.run(words)
        assert code != 0, words
        assert "does not exist" in text or "No such file" in text, (words, text)
    assert await isolated.run(["s3", "ls", "s3://logs"]) == (0, "")
    code, text = await isolated.run(["configure", "set", "default.touch", "/tmp/x"])
    assert code != 0
    assert "Read-only file system" in text
    for target in (str(written), "/usr/x", "/bombus/x", sys.prefix + "/x"):
        assert (await isolated.run(["s3", "cp", "s3://logs/x", target]))[0] != 0
    assert not written.exists()


async def test_its_process_has_no_power_over_the_kernel_and_limits(isolated: AwsConsole) -> None:
    assert (await isolated.run(["s3", "ls"]))[0] == 0, "by now it is the program itself"
    inside = Path(f"/proc/{Path(f'/proc/{isolated.pid}/task/{isolated.pid}/children').read_text().strip()}")
    mounts = [line.split() for line in (inside / "mountinfo").read_text().splitlines()]
    assert {fields[4]: "ro" in fields[5].split(",") for fields in mounts if fields[4] in ("/", "/proc", "/usr")} == {
        "/": True, "/proc": True, "/usr": True,
    }  # fmt: skip
    status = dict(line.split(":", 1) for line in (inside / "status").read_text().splitlines())
    assert {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
        "CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": 0, "CapAmb": 0,
    }  # fmt: skip
    assert status["NoNewPrivs"].strip() == "1"
    limits = {line[:26].strip(): line[26:].split()[0] for line in (inside / "limits").read_text().splitlines()}
    assert (limits["Max address space"], limits["Max core file size"]) == (str(MEMORY_BYTES_MAX), "0")


async def test_nothing_of_a_closed_console_stays_open(simulator: SimulatorProcess) -> None:
    open_before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        console = AwsConsole(simulator.address)
        assert (await console.run(["s3", "ls"]))[0] == 0
        await console.close()
    assert len(os.listdir("/dev/fd")) <= open_before + 1  # that of the event loop's children, perhaps


async def test_another_simulator_and_servers_of_this_machine_cannot_be_reached(
    isolated: AwsConsole, listener: Listener
) -> None:
    code, text = await isolated.run(["--endpoint-url", listener.address, "s3", "ls"])
    assert code != 0
    assert "Could not connect" in text
    assert listener.connections == 0
    assert (await isolated.run(["s3", "ls"]))[0] == 0, "its own is there"


async def test_where_no_namespaces_are_made_it_runs_with_a_home_of_its_own_and_says_so(
    simulator: SimulatorProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    console = AwsConsole(simulator.address)
    with caplog.at_level(logging.WARNING, "bombus"):
        await console.start()
    try:
        assert not console.is_isolated
        assert "without separate namespaces (that needs Linux, with `unshare`" in caplog.text
        assert await console.run(words_of_command("aws s3 mb s3://logs")) == (0, "make_bucket: logs")
        code, _ = await console.run(["configure", "set", "region", "x", "--profile", "p"])
        assert code == 0
        assert not (tmp_path / ".aws").exists()
    finally:
        await console.close()
