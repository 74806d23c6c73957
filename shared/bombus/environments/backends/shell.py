"""A shell in a sandbox: no network, a folder of its own, the system read-only, and nothing outlives a command."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from bombus.environments.kinds import EnvironmentLost
from bombus.errors import Code, Refused
from bombus.host.process import die_with_this_process

SETUP = Path(__file__).with_name("sandbox.sh")
OUTPUT_BYTES_MAX = 64 * 1024
COMMAND_S = 30.0
COMMAND_S_MAX = 600.0
CHECK_S = 10.0
NAMESPACES = ("--user", "--map-root-user", "--pid", "--fork", "--net", "--mount", "--ipc", "--uts", "--kill-child")
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", "TERM": "dumb"}


class ShellResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a command printed, both streams in the order of their coming, and its exit code."""

    output: str
    code: int
    timed_out: bool = False
    cut: bool = False  # there was more output than is kept


class ShellSandbox:
    """A folder, and commands that run in it in namespaces of their own.

    A command sees `/work`, which is the folder, programs and libraries of this machine that it cannot change, and
    neither a network nor other processes. It has no capabilities. With the command all its processes end.
    """

    def __init__(self) -> None:
        self.address = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        """Make the folder. Raises `Refused` where this machine makes no sandboxes."""
        self._folder = tempfile.TemporaryDirectory(prefix="bombus-shell-", ignore_cleanup_errors=True)
        self.address = self._folder.name
        for name in ("root", "work"):
            (Path(self.address) / name).mkdir()
        if os.geteuid() == 0:  # root gives itself up: inside, it would still own what is root's outside
            for each in (self.address, f"{self.address}/root", f"{self.address}/work"):
                os.chown(each, NOBODY, NOBODY)
        await self._check()

    async def run(self, command: str, timeout_s: float = COMMAND_S) -> ShellResult:
        """Run a line of shell. After `timeout_s` seconds it is killed, with all that it started."""
        if not 0 < timeout_s <= COMMAND_S_MAX:
            raise ValueError(f"a command has up to {COMMAND_S_MAX:.0f} s, and not {timeout_s:g}")
        if self._folder is None:
            raise EnvironmentLost("the sandbox is not there any more")
        process = await asyncio.create_subprocess_exec(
            *(AS_NOBODY if os.geteuid() == 0 else ()),
            "unshare",
            *NAMESPACES,
            "/bin/sh",
            "-c",
            SETUP.read_text(),
            "sandbox",
            f"{self.address}/root",
            f"{self.address}/work",
            command,
            env=VARIABLES,
            cwd="/",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_this_process(),
        )
        output = bytearray()
        seen = 0
        timed_out = False
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while chunk := await process.stdout.read(OUTPUT_BYTES_MAX):
                    seen += len(chunk)
                    output += chunk[: OUTPUT_BYTES_MAX - len(output)]
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return ShellResult(
            output=output.decode(errors="replace"),
            code=process.returncode if process.returncode is not None else -1,
            timed_out=timed_out,
            cut=seen > OUTPUT_BYTES_MAX,
        )

    async def is_healthy(self) -> bool:
        return self._folder is not None and await asyncio.to_thread(os.path.isdir, f"{self.address}/work")

    async def scrub(self) -> None:
        """Empty the folder. Raises `EnvironmentLost` when something in it cannot be removed."""
        work = Path(self.address) / "work"
        try:
            await asyncio.to_thread(_emptied, work)
        except OSError as error:
            raise EnvironmentLost(f"the folder of a sandbox could not be emptied: {error}") from error

    async def stop(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(folder.cleanup)

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
                "this machine makes no sandbox for the shell: the kernel, or the container around it, forbids "
                "namespaces to this user (sysctl kernel.unprivileged_userns_clone, "
                f"kernel.apparmor_restrict_unprivileged_userns). It said: {result.output.strip()[:200]}",
            )


def _emptied(folder: Path) -> None:
    os.chmod(folder, 0o700)
    for parent, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)  # what cannot be listed cannot be removed
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
