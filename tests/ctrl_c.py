"""Programs that tests interrupt as a user does, with Ctrl-C."""

import signal
import subprocess
import sys

from tests.patience import PATIENCE_S


def heed_the_terminal() -> None:
    """Undo, before a program begins, what it may inherit from a shell in the background or from nohup."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def check_that_ctrl_c_ends(program: str) -> None:
    """Run a program, in Python, that sends SIGINT to a thread of its own. It must end as Ctrl-C ends a program."""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        preexec_fn=heed_the_terminal,
    )
    assert ran.returncode == -signal.SIGINT, ran.stderr
    assert ran.stderr.rstrip().endswith("KeyboardInterrupt")
