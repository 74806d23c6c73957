"""Plays one episode by hand: runs a harness in the terminal with one of the hive's models."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bombus.hive.failures import FailureKind
from bombus.machine.process import is_heeded
from bombus.private import private_folder
from bombus.rollout.environment import ModelAccess, agent_variables
from bombus.rollout.presets import PRESETS
from bombus.rollout.process import CannotStart
from bombus.rollout.workspace import EpisodeFolder
from bombus.sdk.client import SwarmClient
from bombus.sdk.types import Credentials, EpisodeKind

DAY_S = 86_400.0
KEEP_ALIVE_S = 10.0
SIGNALLED = 128  # a shell adds this to the number of the signal that ended a program


class HarnessSession(msgspec.Struct, frozen=True, kw_only=True):
    """The harness from `PRESETS` to start, and where to start it. `arguments` come after the preset's flags."""

    harness: str
    arguments: Sequence[str]
    workspace: Path
    kind: EpisodeKind = "train"


@contextmanager
def open_session(client: SwarmClient, kind: EpisodeKind) -> Iterator[Credentials]:
    """Claim an episode and keep it alive while the block runs. The episode is aborted if the block fails."""
    (claimed,) = client.begin_episodes(1, episode_type=kind, max_episode_time=DAY_S)
    try:
        with _signals_raised(), client.keep_alive(claimed.episode_uuid, every_s=KEEP_ALIVE_S):
            yield claimed
    except BaseException:
        client.abort_episode(claimed.episode_uuid, failure=FailureKind.CLIENT, detail="the session was interrupted")
        raise


def run_harness(session: HarnessSession, credentials: Credentials, scratch: Path) -> int:
    """Run the harness in this terminal until its user ends it, and return its exit code. Raises `CannotStart`."""
    preset = PRESETS[session.harness]
    folder = EpisodeFolder(scratch, session.workspace)
    private_folder(folder.home)
    private_folder(folder.temporary)
    variables = agent_variables(ModelAccess.of(credentials), preset, (preset.dialect,), folder)
    words = preset.interactive(session.harness, session.arguments)
    with _ctrl_c_ignored():
        try:
            return subprocess.run(words, cwd=session.workspace, env=variables, check=False).returncode
        except OSError as error:
            raise CannotStart(f"{words[0]} cannot be started: {error.strerror or error}") from error


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise `SystemExit` when the terminal is closed or the process is told to end."""
    earlier = {number: signal.signal(number, _leave) for number in (signal.SIGHUP, signal.SIGTERM) if is_heeded(number)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    sys.exit(SIGNALLED + number)


@contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    """Leave Ctrl-C to the program in the foreground, which does not inherit this handler."""
    earlier = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
