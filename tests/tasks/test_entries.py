"""The process that makes entries of reasoning-gym: the same ones for every program, and whole again after a failure."""

import os
import pickle
import select
import subprocess
import sys
from pathlib import Path

import pytest

from bombus.environments.kinds import ResetFailed
from bombus.tasks.entries import EntryMaker, entry_of
from tests.effort import long_only

# Those that choose from sets in the order of salted hashes, their questions or their gold answers.
SALTED = ("codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
DRAWS = f"""
from bombus.tasks.kinds import TaskDraw
from bombus.tasks.reasoning import ReasoningPuzzle
from bombus.tasks.registry import open_tasks

for name in {SALTED!r}:
    for task in open_tasks("reasoning_gym:" + name).draw(TaskDraw(size=3, seed=5)):
        print(task.task_id, repr(task.main_query), ReasoningPuzzle().gold(task))
"""
ENDS_AT_ONCE = """
import os
from bombus.tasks import entries

entries.entry_of("leg_counting", 0, 0)
print(entries._maker._process.pid, flush=True)
os._exit(0)
"""

FORKED = """
import os, signal, threading
from bombus.tasks import entries

entries.entry_of("leg_counting", 0, 0)
held = threading.Event()
threading.Thread(target=lambda: (entries._maker._one.acquire(), held.set())).start()
held.wait()  # a thread that draws as the program forks
children = []
for child in (1, 2):
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(100)  # nothing waits for it for ever
        for index in range(50):
            question = entries.entry_of("leg_counting", child, index)["question"]
            os.write(1, f"{child} {index} {question!r}\\n".encode())  # a line is one write: both write to one pipe
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
os._exit(0)
"""


def printed(program: str, salt: str) -> str:
    variables = {**os.environ, "PYTHONHASHSEED": salt}
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, check=True, capture_output=True, text=True, timeout=120
    ).stdout


@long_only
def test_programs_whose_hashes_are_salted_differently_draw_the_same_tasks() -> None:
    first, second = printed(DRAWS, "1"), printed(DRAWS, "2")
    assert len(first.splitlines()) == 3 * len(SALTED)
    assert first == second


def test_programs_that_were_forked_have_processes_of_their_own() -> None:
    lines = sorted(printed(FORKED, "0").splitlines())
    expected = [
        f"{child} {index} {entry_of('leg_counting', child, index)['question']!r}"
        for child in (1, 2)
        for index in range(50)
    ]
    assert lines == sorted(expected)


def test_files_of_the_folder_that_a_program_runs_in_are_no_modules_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise OSError('a file of the user')")
    monkeypatch.chdir(tmp_path)
    maker = EntryMaker()
    assert maker.pickled_entry("leg_counting", 0, 0)
    maker.close()


def test_ctrl_c_in_a_terminal_is_for_the_program_alone() -> None:
    maker = EntryMaker()
    maker.pickled_entry("leg_counting", 0, 0)
    assert maker._process is not None
    assert os.getpgid(maker._process.pid) != os.getpgid(0)
    maker.close()


def test_an_entry_is_another_object_each_time() -> None:
    entry = entry_of("leg_counting", 0, 0)
    question = entry["question"]
    entry["question"] = "changed"
    assert entry_of("leg_counting", 0, 0)["question"] == question


def test_a_generator_that_fails_is_told_and_the_next_entry_is_made() -> None:
    maker = EntryMaker()
    with pytest.raises(ResetFailed, match=r"entry 3 of reasoning_gym:no_such could not be made: .*no_such"):
        maker.pickled_entry("no_such", 0, 3)
    assert "legs" in pickle.loads(maker.pickled_entry("leg_counting", 0, 0))["question"]
    maker.close()


def test_a_process_that_was_killed_costs_one_entry() -> None:
    maker = EntryMaker()
    whole = maker.pickled_entry("leg_counting", 0, 0)
    assert maker._process is not None
    maker._process.kill()
    maker._process.wait()
    with pytest.raises(ResetFailed, match="entry 0 of reasoning_gym:leg_counting could not be made"):
        maker.pickled_entry("leg_counting", 0, 0)
    assert maker.pickled_entry("leg_counting", 0, 0) == whole
    maker.close()


def test_the_process_ends_with_its_program_however_that_ends() -> None:
    process = int(printed(ENDS_AT_ONCE, "0"))
    try:
        ended = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], 60)[0]
    finally:
        os.close(ended)
