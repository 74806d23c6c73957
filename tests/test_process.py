"""How processes end with the one that started them."""

import subprocess
import sys

import psutil

SUPERVISOR = """
import os, subprocess, sys, time
os.environ["BOMBUS_PARENT"] = str(os.getpid())
stranger = "import time; print('here', flush=True); time.sleep(600)"
command = [sys.executable, "-m", "bombus.process", sys.executable, "-c", stranger]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_program_that_is_not_ours_ends_with_a_supervisor_that_is_killed() -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    stranger = psutil.Process(int(supervisor.stdout.readline()))
    try:
        assert stranger.is_running()
        supervisor.kill()
        supervisor.wait(10)
        gone, _ = psutil.wait_procs([stranger], timeout=10)
        assert gone == [stranger]
    finally:
        supervisor.kill()
        if stranger.is_running():
            stranger.kill()
        supervisor.stdout.close()
