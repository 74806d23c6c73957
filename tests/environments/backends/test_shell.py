"""The shell sandbox: what a command can reach, and what is left of it."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.shell import DIES_WITH_US, OUTPUT_BYTES_MAX, UNLESS_IT_DIED, ShellSandbox
from bombus.environments.kinds import EnvironmentLost
from bombus.errors import Refused
from tests.environments.backends.test_folders import make_deep
from tests.patience import PATIENCE_S, until

NOBODY = 65534
PROGRAM = """
import asyncio
from bombus.environments.backends.shell import ShellSandbox

async def main():
    sandbox = ShellSandbox()
    await sandbox.start()
    print(sandbox.address, flush=True)
    input()
    await sandbox.run("echo yes > begun; exec sleep 60.5", 60)

asyncio.run(main())
"""


def why_no_namespaces() -> str:
    """Return what this machine says against namespaces, as a sandbox that is broken would not."""
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    try:
        made = subprocess.run(
            [*as_nobody, "unshare", "-Urpfn", "--mount-proc", "true"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        return str(error)
    return made.stderr.strip() if made.returncode else ""


@pytest.fixture(scope="session")
def has_namespaces() -> None:
    if why := why_no_namespaces():
        pytest.skip(f"this machine makes no namespaces, so there is no sandbox here: {why}")


@pytest.fixture
async def box(has_namespaces: None) -> AsyncIterator[ShellSandbox]:
    sandbox = ShellSandbox(work_mb_max=8, files_max=300, memory_mb_max=256)
    try:
        await sandbox.start()
        yield sandbox
    finally:
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


async def test_a_command_has_no_capabilities_and_cannot_get_any(box: ShellSandbox) -> None:
    status = (await box.run("grep -E '^(Cap|NoNewPrivs)' /proc/self/status")).output.split()
    held = dict(zip(status[::2], status[1::2], strict=True))
    for kind in ("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"):
        assert int(held[kind], 16) == 0, kind
    assert held["NoNewPrivs:"] == "1"


@pytest.mark.parametrize("command", ["mount -o remount,rw /usr", "mount -t tmpfs none /tmp", "hostname other"])
async def test_what_needs_a_capability_fails(box: ShellSandbox, command: str) -> None:
    assert (await box.run(f"{command} 2>/dev/null")).code != 0


async def test_a_command_is_nobody_to_the_machine(box: ShellSandbox) -> None:
    await box.run("touch mine")
    expected = NOBODY if os.geteuid() == 0 else os.geteuid()
    assert os.stat(os.path.join(box.address, "work", "mine")).st_uid == expected, "root gives itself up"


async def test_a_command_that_takes_too_long_ends_with_all_that_it_started(box: ShellSandbox) -> None:
    result = await box.run("sleep 77.7 & sleep 77.7", timeout_s=1)
    assert result.timed_out
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "77.7"]]
    assert left == []


async def test_a_process_in_the_background_ends_with_its_command(box: ShellSandbox) -> None:
    await box.run("sleep 77.6 > /dev/null 2>&1 &")
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "77.6"]]
    assert left == []


async def test_a_command_that_leaves_its_session_ends_as_any_other(box: ShellSandbox) -> None:
    async with asyncio.timeout(15):
        result = await box.run("exec setsid setpriv --pdeathsig=clear sleep 30.5", timeout_s=1)
    assert result.timed_out
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "30.5"]]
    assert left == []


def test_a_command_ends_with_the_program_that_runs_it_however_that_ends(has_namespaces: None) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdin is not None
    assert program.stdout is not None
    address = program.stdout.readline().decode().strip()
    begun = Path(address, "work/begun")
    os.mkfifo(begun)
    begun.chmod(0o666)
    program.stdin.write(b"go on\n")
    program.stdin.flush()
    assert begun.read_text() == "yes\n"
    started = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    program.communicate(timeout=20)
    _, alive = psutil.wait_procs(started, timeout=20)
    shutil.rmtree(address)
    assert alive == []


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


async def test_a_scrub_follows_folders_however_deep(box: ShellSandbox) -> None:
    make_deep(f"{box.address}/work")
    await box.scrub()
    assert (await box.run("ls -A")).output == ""


async def test_a_folder_that_is_full_takes_nothing_more_until_something_is_removed(box: ShellSandbox) -> None:
    filled = await box.run("for i in 1 2 3; do head -c 4000000 /dev/urandom > file$i; done")
    assert filled.is_full
    assert "/work holds more than 8 MiB or 300 files: remove files" in filled.output
    assert (await box.run("echo more > file4")).code != 0
    emptied = await box.run("rm file1 file2")
    assert (emptied.code, emptied.is_full) == (0, False)
    assert (await box.run("echo more > file4; cat file4")).output == "more\n"


async def test_a_command_that_fills_the_folder_is_killed(box: ShellSandbox) -> None:
    filled = await box.run("head -c 12000000 /dev/urandom > file; sleep 50", timeout_s=55)
    assert (filled.is_full, filled.timed_out) == (True, False)
    await box.scrub()
    assert not (await box.run("true")).is_full


async def test_a_command_that_makes_too_many_files_is_killed_and_makes_no_more_until_some_are_removed(
    has_namespaces: None,
) -> None:
    box = ShellSandbox(files_max=300)  # with room for the folder itself, which stays as large as it was
    try:
        await box.start()
        filled = await box.run("i=0; while :; do i=$((i+1)); : > $i; done", timeout_s=55)
        assert (filled.is_full, filled.timed_out) == (True, False)
        more = await box.run("i=0; while :; do i=$((i+1)); : > more$i; done", timeout_s=55)
        assert (more.is_full, more.timed_out) == (True, False)
        assert not (await box.run("find . -type f -delete")).is_full
    finally:
        await box.stop()


def test_a_command_whose_program_died_before_it_asked_for_that_signal_does_nothing() -> None:
    for parent, said in ((os.getpid(), b"on\n"), (os.getppid(), b"")):
        words = [*DIES_WITH_US, "--", *UNLESS_IT_DIED, str(parent), "echo", "on"]
        assert subprocess.run(words, stdout=subprocess.PIPE, check=False).stdout == said


EATER = "dd if=/dev/zero of=/dev/null bs=100M count=1000000"  # holds 100 MB for as long as it runs
IN_NO_PROCESS = """
import os
held = [os.memfd_create("x") for _ in range(4)]
for each in held:
    os.write(each, bytes(100_000_000))
import time; time.sleep(50)
"""


@pytest.mark.parametrize("command", [f"{EATER} & {EATER} & {EATER} & wait", f"python3 -c '{IN_NO_PROCESS}'"])
async def test_the_processes_of_a_command_share_its_memory(box: ShellSandbox, command: str) -> None:
    eaten = await box.run(command, timeout_s=50)
    assert (eaten.out_of_memory, eaten.timed_out) == (True, False)
    assert "took more than 256 MiB of memory together" in eaten.output
    assert (await box.run("echo on")).output == "on\n"


async def test_memory_that_processes_share_is_counted_once(box: ShellSandbox) -> None:
    forks = "import os, time; held = bytes(60_000_000); [os.fork() for _ in range(3)]; time.sleep(1); print(1)"
    shared = await box.run(f"python3 -c '{forks}'", timeout_s=50)
    assert (shared.code, shared.out_of_memory) == (0, False)


async def test_a_pool_of_sandboxes_keeps_their_files_apart(box: ShellSandbox) -> None:
    async with BackendPool(lambda number: ShellSandbox(), 2, kind="Shell") as pool:
        one, other = await pool.take("a"), await pool.take("b")
        assert isinstance(one, ShellSandbox)
        assert isinstance(other, ShellSandbox)
        await one.run("echo one > file")
        assert (await other.run("ls -A")).output == ""


async def test_a_sandbox_is_well_while_code_of_environments_has_all_threads_of_the_loop(box: ShellSandbox) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        may_end.wait()

    busy = [asyncio.create_task(asyncio.to_thread(hold)) for _ in range(64)]  # a loop has 32 threads at most
    try:
        await until(has_begun.is_set)
        async with asyncio.timeout(PATIENCE_S):
            assert await box.is_healthy()
    finally:
        may_end.set()
        await asyncio.gather(*busy)


async def test_a_sandbox_that_is_stopped_runs_nothing(box: ShellSandbox) -> None:
    await box.stop()
    await box.stop()
    assert not await box.is_healthy()
    with pytest.raises(EnvironmentLost, match="has been closed"):
        await box.run("true")


async def test_a_machine_that_makes_no_sandbox_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="the shell sandbox needs Linux, with `unshare` and `setpriv`"):
        await ShellSandbox().start()
