"""Answers to reasoning-gym's questions are text that a model has written, and some verifiers evaluate it as Python."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from bombus.environments.backends.shell import NAMESPACES
from bombus.tasks.entries import entry_of
from bombus.tasks.isolation import why_no_isolation
from bombus.tasks.reasoning import score_of
from bombus.tasks.verifying import AnswerJudge, _ask, _judged
from tests.patience import PATIENCE_S, wait_until

HANGS = "9**9**9"  # without leaving Python another turn
IN_A_PROGRAM = """
from bombus.tasks.entries import entry_of
from bombus.tasks.verifying import judge
print(judge.score("countdown", "1", entry_of("countdown", 0, 0)), flush=True)
print(judge._process.pid, flush=True)
input()
"""


@cache
def the_entry() -> dict[str, Any]:
    """Return one whose answer is an expression, for SymPy."""
    return entry_of("countdown", 0, 0)


def gold() -> str:
    return str(the_entry()["answer"])


def needs_namespaces() -> None:
    if why_no_isolation() or subprocess.run(["unshare", *NAMESPACES, "true"], check=False).returncode:
        pytest.skip("this kernel allows no namespaces")


@pytest.fixture(scope="module")
def judge() -> Iterator[AnswerJudge]:
    made = AnswerJudge(verify_s=1.0)
    yield made
    made.close()


@pytest.mark.parametrize("generator", ["countdown", "puzzle24", "string_insertion", "spiral_matrix", "n_queens"])
def test_an_answer_that_is_code_is_worth_nothing_and_changes_nothing_here(tmp_path: Path, generator: str) -> None:
    needs_namespaces()
    mark = tmp_path / "mark"
    for code in (f"open({str(mark)!r}, 'w')", f"__import__('os').system('touch {mark}')"):
        assert score_of(generator, code, entry_of(generator, 0, 0)) < 0.1
    assert not mark.exists()


def test_an_answer_sees_no_variable_and_no_connection_of_another_one(
    monkeypatch: pytest.MonkeyPatch, judge: AnswerJudge
) -> None:
    needs_namespaces()
    # It is right if it is 24, has four numbers from 1 to 10, and may call what it likes.
    monkeypatch.setenv("OPENAI_API_KEY", "k" * 24)
    fresh, entry = AnswerJudge(), entry_of("puzzle24", 0, 0)
    try:
        assert fresh.score("puzzle24", "len('k'*(6+6+6+6))", entry) == 1.0
        key = "len(__import__('os').environ.get('OPENAI_API_KEY', '')) + 1*1 - 1*1"
        assert fresh.score("puzzle24", key, entry) != 1.0
    finally:
        fresh.close()
    hung = threading.Thread(target=lambda: judge.score("countdown", HANGS, the_entry()))
    hung.start()
    assert judge.score("countdown", gold(), the_entry()) == 1.0  # by now the other one is being judged
    # The three standard streams, its own connection, and the folder that is listed.
    assert judge.score("puzzle24", "len(__import__('os').listdir('/proc/self/fd')) + 10 + 7 + 1 + 1", entry) == 1.0
    hung.join(PATIENCE_S)


def test_an_answer_that_hangs_is_worth_nothing_and_holds_up_no_other(judge: AnswerJudge) -> None:
    assert judge.score("countdown", gold(), the_entry()) == 1.0
    hung: list[float | None] = []
    hang = lambda: hung.append(judge.score("countdown", HANGS, the_entry()))  # noqa: E731
    threads = [threading.Thread(target=hang) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert judge.score("countdown", gold(), the_entry()) == 1.0
    for thread in threads:
        thread.join(PATIENCE_S)
    assert hung == [None] * 4
    assert judge.score("countdown", gold(), the_entry()) == 1.0


def test_an_answer_that_ends_its_process_is_worth_nothing(judge: AnswerJudge) -> None:
    assert judge.score("countdown", "__import__('os')._exit(0)", the_entry()) is None
    assert judge.score("countdown", "__import__('os').abort()", the_entry()) is None
    assert judge.score("countdown", gold(), the_entry()) == 1.0


def test_a_score_that_is_read_late_is_the_score() -> None:
    patient, (ours, theirs) = AnswerJudge(verify_s=PATIENCE_S), socket.socketpair()
    with closing(patient), ours, theirs:
        patient._hand_over("countdown", theirs)
        _ask(ours, pickle.dumps((gold(), the_entry())))
        wait_until(lambda: ours.recv(64, socket.MSG_PEEK).endswith(b"-\n"))
        assert _judged(ours, 1.0) == 1.0


def test_an_answer_that_kills_all_processes_kills_no_other_answer() -> None:
    needs_namespaces()
    judge = AnswerJudge()
    try:
        assert judge.score("countdown", gold(), the_entry()) == 1.0
        ours, theirs = socket.socketpair()
        with ours, theirs:
            judge._hand_over("countdown", theirs)  # it has begun, and waits for what to judge
            judge.score("countdown", f"__import__('os').kill(-1, 9) or {gold()}", the_entry())
            _ask(ours, pickle.dumps((gold(), the_entry())))
            assert _judged(ours, 1.0) == 1.0
    finally:
        judge.close()


def test_what_an_answer_starts_ends_with_it(judge: AnswerJudge) -> None:
    needs_namespaces()
    judge.score("countdown", gold(), the_entry())
    assert judge._process is not None
    judging = psutil.Process(judge._process.pid)
    judge.score("countdown", "9**9**9 if __import__('os').fork() == 0 else 1", the_entry())
    wait_until(lambda: len(judging.children(recursive=True)) == 1)


def test_a_program_that_is_killed_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    judge = AnswerJudge()
    try:
        assert judge.score("countdown", gold(), the_entry()) == 1.0
        assert list(tmp_path.iterdir()) == []
    finally:
        judge.close()


def test_a_process_that_was_killed_costs_no_answer(judge: AnswerJudge) -> None:
    assert judge.score("countdown", gold(), the_entry()) == 1.0
    assert judge._process is not None
    judge._process.kill()
    judge._process.wait()
    assert judge.score("countdown", gold(), the_entry()) == 1.0


def test_the_process_ends_with_its_program_however_that_ends() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", IN_A_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    program.stdout.readline()
    judging = psutil.Process(int(program.stdout.readline()))
    all_of_it = [judging, *judging.children(recursive=True)]
    program.kill()
    program.communicate()
    _, alive = psutil.wait_procs(all_of_it, timeout=PATIENCE_S)
    assert alive == []


def test_a_thread_that_a_program_leaves_starts_no_process_when_that_has_ended(tmp_path: Path) -> None:
    code = """
import threading
from bombus.tasks.entries import entry_of
from bombus.tasks.verifying import judge
entry, first = entry_of("countdown", 0, 0), threading.Semaphore(0)
def score():
    while True:
        judge.score("countdown", "1", entry)
        first.release()
threading.Thread(target=score, daemon=True).start()
first.acquire()
judge.end()
try:
    judge.score("countdown", "1", entry)
except Exception as error:
    print(error)
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "the program is ending" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_where_no_namespaces_are_made_answers_are_judged_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    judge = AnswerJudge(verify_s=30.0)
    try:
        began = time.monotonic()
        assert judge.score("countdown", gold(), the_entry()) == 1.0, time.monotonic() - began
        assert "are judged without namespaces (that needs Linux, with `unshare`" in caplog.text
    finally:
        judge.close()
