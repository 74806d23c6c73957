"""Runs one command as a child, and ends all of the command's processes when the command ends.

When a vLLM server is killed, its engine's processes keep running, each holding gigabytes of memory. This keeper is in
the same process group as those processes. It kills the whole group, including itself, when the command ends, when the
keeper is terminated, or when the process that started it dies. It imports nothing from bombus, so that it stays small.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

GRACE_S = 10
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        signal.alarm(GRACE_S)
        if child is None:
            raise SystemExit
        child.terminate()

    def give_up(number: int, frame: FrameType | None) -> None:
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, give_up)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before prctl was called
        return
    child = subprocess.Popen(command)
    code = child.wait()
    print(f"the engine's process ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
