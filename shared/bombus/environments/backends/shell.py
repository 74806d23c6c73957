"""A sandboxed shell: no network, its own folder, a read-only system, and no process outlives its command."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec

from bombus.environments.backends.folders import BackendFolder, FolderUse, empty_folder, use_of
from bombus.environments.backends.memory import memory_of
from bombus.environments.kinds import SandboxLost
from bombus.errors import Code, Refused

SETUP = Path(__file__).with_name("sandbox.sh")
OUTPUT_BYTES_MAX = 64 * 1024
COMMAND_S = 30.0
COMMAND_S_MAX = 600.0
CHECK_S = 10.0
WORK_MB_MAX = 1024  # limit for all files in the folder
FILES_MAX = 50_000  # limit for files and folders in the folder
MEMORY_MB_MAX = 4096  # limit for all processes of a command together
FILE_BYTES_MAX = 512 << 20
MEASURE_S = 1.0
MEASURE_MEMORY_S = 0.1
NAMESPACES = ("--user", "--map-root-user", "--pid", "--fork", "--net", "--mount", "--ipc", "--uts", "--kill-child")
NOBODY = 65534
# Kills the command when this process dies. A `preexec_fn` that did this would copy the whole process first.
DIES_WITH_US = ("setpriv", "--pdeathsig=KILL")
AS_NOBODY = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
UNLESS_IT_DIED = ("/bin/sh", "-c", 'test "$PPID" = "$0" && exec "$@"')  # closes the race before setpriv takes effect
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "TERM": "dumb"}


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """A command's exit code, and its output: both streams, interleaved as they arrived."""

    output: str
    code: int
    timed_out: bool = False
    cut: bool = False  # whether there was more output than could be kept
    is_full: bool = False  # whether the folder is over its limit: nothing can be written until files are removed
    out_of_memory: bool = False  # whether the command's processes exceeded their memory limit and were killed


class ShellSandbox:
    """A folder, and commands that run in it in separate namespaces.

    A command sees the folder as `/work`, and this machine's programs and libraries, read-only. It sees no network and
    no other processes, and has no capabilities. When the command ends, all its processes are killed. A command that
    fills the folder beyond `work_mb_max` or `files_max` is killed, and later commands cannot write until there is room
    again. A command whose processes together use more than `memory_mb_max` is killed too.
    """

    def __init__(
        self, work_mb_max: int = WORK_MB_MAX, files_max: int = FILES_MAX, memory_mb_max: int = MEMORY_MB_MAX
    ) -> None:
        self.address = ""
        self._folder: BackendFolder | None = None
        self._limit = FolderUse(work_mb_max, files_max)
        self._memory_mb_max = memory_mb_max
        self._use = FolderUse(0, 0)  # disk usage after the last command

    async def start(self) -> None:
        """Make the folder. Raises `Refused` if this machine cannot create sandboxes."""
        self._folder = BackendFolder("shell")
        self.address = self._folder.path
        for name in ("root", "work"):
            (Path(self.address) / name).mkdir()
        if os.geteuid() == 0:  # root drops its privileges: even inside the sandbox, it would own root's files outside
            for each in (self.address, f"{self.address}/root", f"{self.address}/work"):
                os.chown(each, NOBODY, NOBODY)
        await self._check()

    async def run(self, command: str, timeout_s: float = COMMAND_S) -> ShellResult:
        """Run a shell command line. After `timeout_s` seconds, kill it and all processes that it started."""
        if not 0 < timeout_s <= COMMAND_S_MAX:
            raise ValueError(f"timeout_s is {timeout_s:g}: it must be above 0 and at most {COMMAND_S_MAX:.0f} s")
        if self._folder is None:
            raise SandboxLost("the sandbox has been closed")
        process = await asyncio.create_subprocess_exec(
            *DIES_WITH_US,
            *(AS_NOBODY if os.geteuid() == 0 else ()),
            "--",
            *UNLESS_IT_DIED,
            str(os.getpid()),
            "unshare",
            *NAMESPACES,
            "/bin/sh",
            "-c",
            SETUP.read_text(),
            "sandbox",
            f"{self.address}/root",
            f"{self.address}/work",
            str(0 if self._is_full else FILE_BYTES_MAX),
            str(self._memory_mb_max << 20),
            command,
            env=VARIABLES,
            cwd="/",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        output = bytearray()
        seen = 0
        timed_out = False
        assert process.stdout is not None
        filling = asyncio.create_task(self._kill_when_full(process.pid))
        eating = asyncio.create_task(self._kill_when_out_of_memory(process.pid))
        try:
            async with asyncio.timeout(timeout_s):
                while chunk := await process.stdout.read(OUTPUT_BYTES_MAX):
                    seen += len(chunk)
                    output += chunk[: OUTPUT_BYTES_MAX - len(output)]
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            filling.cancel()
            eating.cancel()
            _kill_group(process.pid)
            await process.wait()
        self._use = await use_of(f"{self.address}/work")
        said = output.decode(errors="replace")
        if self._is_full:
            said += f"\n[/work holds more than {self._limits()}: remove files before writing anything]\n"
        if out_of_memory := _has_returned(eating):
            said += f"\n[killed: its processes took more than {self._memory_mb_max} MiB of memory together]\n"
        return ShellResult(
            output=said,
            code=process.returncode if process.returncode is not None else -1,
            timed_out=timed_out,
            cut=seen > OUTPUT_BYTES_MAX,
            is_full=self._is_full,
            out_of_memory=out_of_memory,
        )

    async def is_healthy(self) -> bool:
        return self._folder is not None and os.path.isdir(f"{self.address}/work")

    async def scrub(self) -> None:
        """Empty the folder. Raises `SandboxLost` if something in it cannot be removed."""
        try:
            await empty_folder(f"{self.address}/work")
        except OSError as error:
            raise SandboxLost(f"the folder of a sandbox could not be emptied: {error}") from error
        self._use = FolderUse(0, 0)

    async def stop(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await folder.remove()

    @property
    def _is_full(self) -> bool:
        return self._use.megabytes > self._limit.megabytes or self._use.files > self._limit.files

    def _limits(self) -> str:
        return f"{self._limit.megabytes} MiB or {self._limit.files} files"

    async def _kill_when_full(self, group: int) -> None:
        """Kill a command that fills the folder. If the folder is already over its limit, commands may only remove
        files."""
        most_mb = max(self._limit.megabytes, self._use.megabytes)
        most_files = max(self._limit.files, self._use.files)
        if not self._is_full:
            await asyncio.sleep(MEASURE_S)  # most commands have ended by then
        while (use := await use_of(f"{self.address}/work")).megabytes <= most_mb and use.files <= most_files:
            await asyncio.sleep(MEASURE_S)
        _kill_group(group)

    async def _kill_when_out_of_memory(self, group: int) -> None:
        bytes_max = self._memory_mb_max << 20
        while memory_of(group, bytes_max) <= bytes_max:
            await asyncio.sleep(MEASURE_MEMORY_S)
        _kill_group(group)

    async def _check(self) -> None:
        """Raise `Refused` unless a command runs, sees no network, and cannot write outside its folder."""
        if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("setpriv") is None:
            raise Refused(
                Code.UNSUPPORTED, "the shell sandbox needs Linux, with `unshare` and `setpriv` (package util-linux)"
            )
        result = await self.run("wc -l < /proc/net/dev; touch /usr/.bombus 2>/dev/null && echo writable", CHECK_S)
        if result.code == 0 or result.output.strip() != "3":
            raise Refused(
                Code.UNSUPPORTED,
                "this machine cannot create a sandbox for the shell: the kernel, or the container around it, forbids "
                "namespaces to this user (sysctl kernel.unprivileged_userns_clone, "
                f"kernel.apparmor_restrict_unprivileged_userns). It said: {result.output.strip()[:200]}",
            )


def _has_returned(task: "asyncio.Task[None]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
