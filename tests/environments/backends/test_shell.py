"""The shell sandbox: what a command can reach, and what is left of it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.shell import OUTPUT_BYTES_MAX, ShellSandbox
from bombus.environments.kinds import EnvironmentLost
from bombus.errors import Refused


@pytest.fixture
async def box() -> AsyncIterator[ShellSandbox]:
    sandbox = ShellSandbox()
    try:
        await sandbox.start()
    except Refused as error:
        await sandbox.stop()
        pytest.skip(str(error))
    yield sandbox
    await sandbox.stop()


async def test_commands_share_a_folder_and_say_how_they_ended(box: ShellSandbox) -> None:
    assert (await box.run("echo one > file; pwd; exit 7")).code == 7
    result = await box.run("cat file; echo wrong >&2")
    assert (result.output, result.code, result.timed_out) == ("one\nwrong\n", 0, False)


async def test_there_is_no_network_and_no_other_process(box: ShellSandbox) -> None:
    assert (await box.run("wc -l < /proc/net/dev")).output.strip() == "3", "two lines of heading, and loopback"
    seen = await box.run("ls /proc | grep -c '^[0-9]'")
    assert int(seen.output) <= 6, seen.output


@pytest.mark.parametrize(
    "command",
    [
        "touch /usr/bombus",
        "mount -o remount,bind,rw /usr && touch /usr/bombus",
        "umount -l /usr && touch /usr/bombus",
        "unshare -Urm sh -c 'mount -o remount,bind,rw /usr && touch /usr/bombus'",
        "cat /etc/shadow",
        "ls /home",
        f"cat {Path(__file__).resolve()}",
        "mknod disk b 254 0",
    ],
)
async def test_nothing_of_the_machine_is_written_and_nothing_private_is_read(box: ShellSandbox, command: str) -> None:
    result = await box.run(command)
    assert result.code != 0, result.output
    assert not os.path.exists("/usr/bombus")


async def test_a_command_that_takes_too_long_ends_with_all_that_it_started(box: ShellSandbox) -> None:
    result = await box.run("sleep 77.7 & sleep 77.7", timeout_s=1)
    assert result.timed_out
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "77.7"]]
    assert left == []


async def test_a_process_in_the_background_ends_with_its_command(box: ShellSandbox) -> None:
    await box.run("sleep 77.6 > /dev/null 2>&1 &")
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "77.6"]]
    assert left == []


async def test_processes_have_a_limit(box: ShellSandbox) -> None:
    result = await box.run("i=0; while [ $i -lt 600 ]; do sleep 5 & i=$((i+1)); done; echo all", timeout_s=20)
    assert "all" not in result.output


async def test_output_is_cut_at_its_limit(box: ShellSandbox) -> None:
    result = await box.run("yes | head -c 1000000")
    assert (len(result.output), result.cut, result.code) == (OUTPUT_BYTES_MAX, True, 0)


async def test_a_scrub_leaves_nothing_whatever_its_permissions(box: ShellSandbox) -> None:
    await box.run("mkdir -p a/b; touch a/b/c; ln -s /usr link; chmod 000 a/b a .")
    await box.scrub()
    assert (await box.run("ls -A")).output == ""
    assert await box.is_healthy()
    assert os.path.isdir("/usr/bin")


async def test_a_pool_of_sandboxes_keeps_their_files_apart(box: ShellSandbox) -> None:
    async with BackendPool(lambda number: ShellSandbox(), 2, kind="Shell") as pool:
        one, other = await pool.take("a"), await pool.take("b")
        assert isinstance(one, ShellSandbox)
        assert isinstance(other, ShellSandbox)
        await one.run("echo one > file")
        assert (await other.run("ls -A")).output == ""


async def test_a_sandbox_that_is_stopped_runs_nothing(box: ShellSandbox) -> None:
    await box.stop()
    await box.stop()
    assert not await box.is_healthy()
    with pytest.raises(EnvironmentLost, match="is not there any more"):
        await box.run("true")


async def test_a_machine_that_makes_no_sandbox_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="the shell sandbox needs Linux, with `unshare` and `setpriv`"):
        await ShellSandbox().start()
