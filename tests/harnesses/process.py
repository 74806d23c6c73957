"""Runs a harness as a user would: in a folder of its own, with nothing of ours but the variables that it is given."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT_S = 300.0
OUTPUT_CHARACTERS = 6000


@dataclass(frozen=True)
class Ended:
    """How a harness ended. `code` is None where it was stopped at the limit of time."""

    code: int | None
    output: str


def variables_of(home: Path, bin_folder: Path, proxy: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a harness. Any host but this machine is looked for at `proxy`."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy)
    proxies |= {name.lower(): value for name, value in proxies.items()}
    return {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONPATH": str(Path(__file__).parent / "programs"),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        **proxies,
        **own,
    }


async def run(command: Sequence[str], workspace: Path, variables: Mapping[str, str], limit_s: float = LIMIT_S) -> Ended:
    """Run a harness to its end, or stop it after `limit_s` seconds. Nothing that it started is left running."""
    with (Path(variables["HOME"]) / "output.txt").open("w+b") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=workspace,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await asyncio.to_thread(end_leftovers, variables["HOME"])
        output.seek(0)
        return Ended(code, output.read().decode(errors="replace")[-OUTPUT_CHARACTERS:])


def end_leftovers(home: str) -> None:
    """Kill the processes that were started with this HOME and left their group."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == home:
                process.kill()
