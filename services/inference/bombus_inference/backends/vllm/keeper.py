"""Runs one command as a child, and leaves nothing of it behind.

A vLLM that is killed leaves its engine's processes behind, gigabytes each. This one shares their process group. When
the command ends, when it is told to stop, or when the process that started it dies, it ends the whole group, itself
included. It imports nothing of ours, so that it weighs little.
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
    if os.getppid() != parent:  # it died before we asked
        return
    child = subprocess.Popen(command)
    code = child.wait()
    print(f"the engine's process ended with code {code}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
