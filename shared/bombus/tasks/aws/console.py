"""The AWS command line for one environment: a separate process that can reach one simulator, and nothing else."""

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from bombus.environments.kinds import EnvironmentLost
from bombus.machine.process import die_with_this_process, kill
from bombus.tasks.aws.isolation import LINE_BYTES_MAX, PACKAGES, WORKER, IsolatedWorker
from bombus.tasks.aws.worker import WorkerRequest
from bombus.tasks.isolation import import_path

COMMAND_S = 45.0
# With cli_follow_urlparam off, a value that is a URL is used as it is instead of being fetched.
CONFIG = "[default]\nregion = us-east-1\noutput = json\ncli_follow_urlparam = false\n"


class CommandKilled(EnvironmentLost):
    """Raised if a command did not end in time, or ended the console's process. The next command gets a new process."""


class AwsConsole:
    """Carries out commands at a simulator's address, one at a time.

    If a command hangs or is cancelled, its process is killed and the next command gets a new one, so a caller that
    cancels a command may still ask for the account's state. `is_isolated` says whether the process is in separate
    namespaces, without access to this machine's files and network.
    """

    def __init__(self, address: str, command_s: float = COMMAND_S) -> None:
        self.address = address
        self._command_s = command_s
        self.is_isolated = False
        self._folder = tempfile.TemporaryDirectory(prefix="bombus-aws-", ignore_cleanup_errors=True)
        self._isolated = IsolatedWorker(Path(self._folder.name), address)
        self._process: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process now, so that the first command does not have to wait for it."""
        async with self._one:
            await self._running()

    async def _running(self) -> asyncio.subprocess.Process:
        """Return the process, starting it if necessary. Raises `EnvironmentLost` once the console is closed."""
        if self._process is None and not self._is_closed:
            try:
                self._process = await self._started()
            except BaseException:  # including a cancellation: end whatever has been started
                await self._end()
                raise
        if self._is_closed or self._process is None:  # the console may be closed while the process starts
            await self._end()
            raise EnvironmentLost("the console of this environment is closed")
        return self._process

    async def _started(self) -> asyncio.subprocess.Process:
        folder = Path(self._folder.name)
        config, home = folder / "config", folder / "home"
        config.write_text(CONFIG)
        home.mkdir(exist_ok=True)
        variables = _variables(str(home), str(config))
        self.is_isolated = await self._isolated.start(config, variables)
        if self._isolated.process is not None:
            return self._isolated.process
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *WORKER,
            env=variables,
            cwd=home,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_this_process(),
            limit=LINE_BYTES_MAX,
        )

    async def run(self, words: list[str]) -> tuple[int, str]:
        """Carry out a command, given as the words from `words_of_command`. Return its exit code and its output.

        Raises `CommandKilled`, or `EnvironmentLost` once the console is closed.
        """
        async with self._one:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            whole = ["--endpoint-url", self.address, *words]
            answered = False
            try:
                process.stdin.write(msgspec.json.encode(WorkerRequest(words=whole)) + b"\n")
                async with asyncio.timeout(self._command_s):
                    await process.stdin.drain()
                    line = await process.stdout.readline()
                answered = bool(line)
                if not answered:
                    raise CommandKilled("the command ended the process of the AWS command line")
                code, text = msgspec.json.decode(line, type=tuple[int, str])
            except TimeoutError as error:
                raise CommandKilled(f"the command did not end within {self._command_s:g} s") from error
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                raise CommandKilled("the command gave no answer that can be read") from error
            finally:
                if not answered:  # even if cancelled: its answer would be taken for the next command's
                    await self._end()
            return code, text.strip()

    async def close(self) -> None:
        """End the process. Closing again does nothing."""
        self._is_closed = True
        await self._end()
        async with self._one:  # by then, a start or a command in progress has ended
            await asyncio.to_thread(self._folder.cleanup)

    async def _end(self) -> None:
        process, self._process = self._process, None
        await self._isolated.close()
        if process is not None and process.returncode is None:
            kill(process)
            await process.wait()


def _variables(home: str, config: str) -> dict[str, str]:
    """Return all of the process's environment variables.

    Nothing is inherited from our own process, whose variables may contain keys.
    """
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": import_path(PACKAGES),
        "LANG": "C.UTF-8",
        "HOME": home,
        "TMPDIR": home,
        "AWS_CONFIG_FILE": config,
        "AWS_ACCESS_KEY_ID": "simulated",
        "AWS_SECRET_ACCESS_KEY": "simulated",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_PAGER": "",
        "NO_PROXY": "*",
    }
