"""Named points at which a process dies if the environment says so, and only then."""

import re
import signal
import subprocess
import sys
from pathlib import Path

from bombus.faults import Point

ROOT = Path(__file__).parent.parent
LOOP = """
from bombus.faults import Point, reached
for number in range(4):
    reached(Point.TRAINER_STEP_SAID)
    print(number, flush=True)
"""


def process(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOOP], env=environment, capture_output=True, text=True)


def test_without_the_variable_nothing_happens() -> None:
    done = process()
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "2", "3"])


def test_the_process_is_killed_at_the_point_that_is_named() -> None:
    done = process(BOMBUS_KILL_AT="trainer.step.said")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert done.stderr == "SIGKILL at trainer.step.said\n"


def test_a_count_delays_the_signal() -> None:
    done = process(BOMBUS_KILL_AT="trainer.step.said:3")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1"])


def test_another_point_is_passed() -> None:
    assert process(BOMBUS_KILL_AT="trainer.opened").returncode == 0


def test_a_point_that_does_not_exist_is_refused_at_once() -> None:
    done = process(BOMBUS_KILL_AT="trainer.step.siad")
    assert (done.returncode, done.stdout) == (1, "")
    assert "'trainer.step.siad' is not a valid Point" in done.stderr


def test_each_point_stands_somewhere_in_the_code() -> None:
    sources = [path for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"\bPoint\.(\w+),?\s*\)", path.read_text())}
    assert used == {point.name for point in Point}
