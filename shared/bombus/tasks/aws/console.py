"""The AWS command line for one world: a process with a folder of its own that speaks with one simulator."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from bombus.environments.kinds import EnvironmentLost
from bombus.host.process import die_with_this_process, kill
from bombus.tasks.aws.worker import WorkerRequest

COMMAND_S = 45.0
LINE_BYTES_MAX = 16 << 20


class AwsConsole:
    """Carries out commands at a simulator's address, one at a time. After a command that hangs it is dead."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._folder = tempfile.TemporaryDirectory(prefix="bombus-aws-", ignore_cleanup_errors=True)
        self._process: asyncio.subprocess.Process | None = None
        self._one = asyncio.Lock()

    async def start(self) -> None:
        config = Path(self._folder.name) / "config"
        config.write_text("[default]\nregion = us-east-1\noutput = json\ncli_follow_urlparam = false\n")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bombus.tasks.aws.worker",
            env=self._variables(str(config)),
            cwd=self._folder.name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_this_process(),
            limit=LINE_BYTES_MAX,
        )

    async def run(self, words: list[str]) -> tuple[int, str]:
        """Carry out a command, the words after `aws`. Return its exit code, and all that it printed.

        Raises `EnvironmentLost` where the process is gone, or does not answer in time.
        """
        async with self._one:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise EnvironmentLost("the console of this world is closed")
            whole = ["--endpoint-url", self.address, *words]
            answered = False
            try:
                process.stdin.write(msgspec.json.encode(WorkerRequest(words=whole)) + b"\n")
                async with asyncio.timeout(COMMAND_S):
                    await process.stdin.drain()
                    line = await process.stdout.readline()
                answered = bool(line)
                if not answered:
                    raise EnvironmentLost("the process of the AWS command line has ended")
                code, text = msgspec.json.decode(line, type=tuple[int, str])
            except (TimeoutError, OSError, ValueError, msgspec.MsgspecError) as error:
                raise EnvironmentLost(f"aws {' '.join(words[:2])} gave no answer that can be read") from error
            finally:
                if not answered:  # cancelled, too: its answer would be taken for that of the next command
                    await self.close()
            return code, text.strip()

    async def close(self) -> None:
        """End the process. Closing again does nothing."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            kill(process)
            await process.wait()
        await asyncio.to_thread(self._folder.cleanup)

    def _variables(self, config: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
        return {
            **kept,
            "HOME": self._folder.name,
            "TMPDIR": self._folder.name,
            "AWS_CONFIG_FILE": config,
            "AWS_ACCESS_KEY_ID": "simulated",
            "AWS_SECRET_ACCESS_KEY": "simulated",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_PAGER": "",
            "NO_PROXY": "127.0.0.1",
        }
