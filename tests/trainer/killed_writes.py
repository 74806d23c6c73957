"""Kill a process in the middle of a write, at a fault point."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

from bombus.faults import Point, arm

_SERVER = multiprocessing.get_context("forkserver")  # it has imported torch once, and runs no threads
_SERVER.set_forkserver_preload(["bombus_trainer.publish.step_checkpoint"])


def killed_at(point: Point, write: Callable[[Path], object], folder: Path) -> None:
    """Call `write`, a function of a module, on `folder` in another process, which must die at `point`."""
    process = _SERVER.Process(target=_armed, args=(point, write, folder))
    process.start()
    process.join()
    assert process.exitcode == -SIGKILL, f"it was not killed at {point}"


def _armed(point: Point, write: Callable[[Path], object], folder: Path) -> None:
    arm({"BOMBUS_KILL_AT": point})
    write(folder)
