"""Shows the progress of a rollout: in a terminal, one line that is overwritten; otherwise, a line for each episode."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EIO, EPIPE
from typing import TextIO

from bombus.rollout.records import LostEpisode, PlayedEpisode, RolloutTally, mean_of
from bombus.rollout.run import RolloutListener
from bombus.rollout.tasks import AgentTask
from bombus.terminal import escaped, say

CLEAR = "\r\x1b[2K"


def described(task: AgentTask, result: PlayedEpisode | LostEpisode) -> str:
    """Return a one-line description of how an episode went."""
    name = f"{task.task_id} {result.episode}".rstrip()
    if isinstance(result, LostEpisode):
        return f"{name}: {result.loss}: {result.why}"
    stopped = f", stopped: {result.stopped}" if result.stopped is not None else ""
    failed = f", exit code {result.exit_code}" if result.exit_code and result.stopped is None else ""
    used = f"{result.used.calls} calls, {result.used.completion_tokens} tokens"
    return f"{name}: reward {result.reward:g} ({result.seconds:.0f} s, {used}{stopped}{failed})"


class ProgressDisplay(RolloutListener):
    """Shows the progress of a rollout."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._began = time.monotonic()

    def changed(self, tally: RolloutTally) -> None:
        if self._is_terminal:
            line = escaped(tally.line())[: shutil.get_terminal_size().columns - 1]
            with self._perhaps_closed():
                self._stream.write(CLEAR + line)
                self._stream.flush()

    def finished(self, task: AgentTask, result: PlayedEpisode | LostEpisode, tally: RolloutTally) -> None:
        if self._is_terminal and isinstance(result, PlayedEpisode):
            self.changed(tally)
            return
        self._say(described(task, result))

    def stepped(self, rewards: Sequence[float], tally: RolloutTally) -> None:
        after = f"step {tally.steps} after {time.monotonic() - self._began:.0f} s"
        self._say(f"{after}: mean reward {mean_of(rewards)} of {len(rewards)} episodes")

    def close(self, tally: RolloutTally) -> None:
        """Write the summary."""
        self._say(*tally.summary())

    def _say(self, *lines: str) -> None:
        with self._perhaps_closed():
            if self._is_terminal:
                self._stream.write(CLEAR)
            say(*lines, flush=True, file=self._stream)

    @contextmanager
    def _perhaps_closed(self) -> Iterator[None]:
        """Discard output once nothing reads it any more (`| head`, a closed terminal). The rollout continues."""
        try:
            yield
        except OSError as error:
            if error.errno not in (EPIPE, EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # whatever is still in the stream's buffer goes there, too
            os.close(nowhere)
