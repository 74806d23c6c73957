"""`bombus run` and `bombus tasks`, as they are typed, against a server with a scripted model."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.cli import main
from bombus.environments.chat_model import NoModelAnswer
from bombus.environments.rollout import Rollout
from bombus.sdk.types import Credentials
from bombus.tasks.kinds import TaskDraw
from bombus.tasks.playing import FAILURES_IN_A_ROW_MAX, EpisodeScore, ServerFailed, ServerPatience, TaskRun
from bombus.tasks.reasoning import FLAWS, ReasoningPuzzle
from bombus.tasks.registry import open_tasks
from tests.ctrl_c import heed_the_terminal
from tests.gateway.openai_hive import gateway_hive
from tests.tasks.model_server import Conversation, model_server

LEGS = "reasoning_gym:leg_counting"
LEGS_OF = re.compile(r"(\d+) (\w+)")


def nothing(_: Conversation) -> str:
    return "<answer>nothing</answer>"


def first_is_right() -> Callable[[Conversation], str]:
    """Return a model that knows the answer to the first question that it is asked."""
    (task,) = open_tasks(LEGS).draw(TaskDraw(size=1))
    (gold,) = ReasoningPuzzle().gold(task)
    return lambda messages: gold if messages[-1]["content"] == task.main_query else nothing(messages)


def test_a_run_prints_a_line_for_each_episode_a_table_and_writes_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.jsonl"
    with model_server(first_is_right()) as url:
        code = main(["run", "--task", LEGS, "--engine", url, "-n", "4", "--repeat", "2", "--out", str(out)])
    assert code == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert sum(line.startswith(f"{LEGS}/train/0/") for line in lines) == 8
    assert "scripted: 8 episodes in" in printed
    row = next(line.split() for line in lines if line.startswith(f"{LEGS} "))
    assert row[:7] == [LEGS, "8", "0.250", "2/8", "0", "0", "1.0"]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((record["task_id"], record["number"]) for record in records) == [
        (f"{LEGS}/train/0/{task}", number) for task in range(4) for number in range(2)
    ]
    assert [record["reward"] for record in records if record["task_id"].endswith("/0")] == [1.0, 1.0]
    assert all(record["status"] == "completed" and record["turns"] == 1 for record in records)


def test_a_file_of_scores_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scores.jsonl"
    out.write_text("mine\n")
    with model_server(nothing) as url:
        assert main(["run", "--task", LEGS, "--engine", url, "--out", str(out)]) == 2
    assert "already exists: name another file" in capsys.readouterr().err
    assert out.read_text() == "mine\n"


def test_episodes_that_the_server_refuses_are_aborted_and_never_scored_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with model_server(lambda messages: 400) as url:
        assert main(["run", "--task", LEGS, "--engine", url, "-n", "3"]) == 1
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith(f"{LEGS} "))
    assert row[:6] == [LEGS, "0", "-", "-", "0", "3"]
    assert f"{LEGS}: 3 aborted: " in printed
    assert "the scripted model refuses" in printed


def test_a_run_ends_when_nothing_works(capsys: pytest.CaptureFixture[str]) -> None:
    with model_server(lambda messages: 401) as url:
        assert main(["run", "--task", LEGS, "--engine", url, "-n", "200", "--at-once", "1"]) == 1
    printed = capsys.readouterr()
    assert f"{FAILURES_IN_A_ROW_MAX} episodes in a row failed" in printed.err
    assert f"scripted: {FAILURES_IN_A_ROW_MAX} of 200 episodes" in printed.out


def test_why_calls_are_asked_again_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Conversation] = []

    def is_busy_at_first(messages: Conversation) -> str | int:
        asked.append(messages)
        return 503 if len(asked) < 3 else nothing(messages)

    with model_server(is_busy_at_first) as url:
        assert main(["run", "--task", LEGS, "--engine", url, "-n", "2", "--at-once", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["bombus run: the server answered 503: the scripted model refuses; retrying"]
    assert "scripted: 2 episodes in" in printed.out


async def test_a_server_that_never_answers_is_given_up_before_its_episodes_are_over() -> None:
    told: list[EpisodeScore] = []
    reasons: list[str] = []
    patience = ServerPatience(reasons.append, within_s=0.0)
    tasks = open_tasks(LEGS)
    credentials = Credentials(base_url="http://127.0.0.1:1/v1", api_key="k", model="m", episode_uuid="")
    rollout = Rollout(tasks.environment, tasks.budgets, watch=patience)
    play = TaskRun(LEGS, rollout, credentials, told.append, 2, patience)
    with pytest.raises(ServerFailed, match=r"the server has not answered for 0 s: http://127\.0\.0\.1:1/v1/"):
        await play.run(tasks.draw(TaskDraw(size=9)))
    assert len(told) <= 2
    assert "http://127.0.0.1:1/v1/" in reasons[0]


def test_the_patience_with_a_server_begins_with_its_first_failure_and_ends_with_its_first_answer() -> None:
    now = [100.0]
    told: list[str] = []
    patience = ServerPatience(told.append, within_s=60.0, clock=lambda: now[0])
    patience.asked_again("it is busy")
    now[0] += 59.9
    patience.asked_again("it is busy")
    now[0] += 0.1
    with pytest.raises(NoModelAnswer, match="the server has not answered for 60 s: it is away"):
        patience.asked_again("it is away")
    lenient = ServerPatience(told.append, within_s=60.0, clock=lambda: now[0])
    lenient.asked_again("it is busy")
    lenient.answered()
    now[0] += 1000.0
    for why in ("a", "b", "c"):
        lenient.asked_again(why)
    assert lenient.gave_up == ""
    assert told == [f"{why}; retrying" for why in ("it is busy", "it is away", "it is busy", "a", "b")]


def test_only_failures_in_a_row_end_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Conversation] = []

    def mostly_refuses(messages: Conversation) -> str | int:
        asked.append(messages)
        return 401 if len(asked) % FAILURES_IN_A_ROW_MAX else nothing(messages)

    with model_server(mostly_refuses) as url:
        assert main(["run", "--task", LEGS, "--engine", url, "-n", "40", "--at-once", "1"]) == 0
    assert "scripted: 40 episodes in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "http://127.0.0.1:1"], "--task"),
        (["--task", LEGS], "--engine"),
        (["--task", LEGS, "--engine", "http://127.0.0.1:1", "-n", "0"], "-n 0 is refused"),
        (["--task", LEGS, "--engine", "http://[::1"], "--engine 'http://[::1' is refused: it is not an address"),
        (["--task", "chess", "--engine", "http://127.0.0.1:1"], "there are no tasks 'chess'"),
        (["--task", "mine.jsonl", "--engine", "http://127.0.0.1:1"], "To play your own tasks, use `bombus eval --env`"),
        (["--task", LEGS, "--engine", "http://127.0.0.1:1", "--set", "x"], "--set"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["run", *words])
    except SystemExit as done:  # argparse ends the program itself
        code = int(done.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--task", LEGS, "--engine", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1/v1 cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_shows_what_there_is_and_leaves_whole_lines(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    held, asked = threading.Event(), threading.Event()
    count = [0]

    def slow(messages: Conversation) -> str:
        count[0] += 1
        if count[0] > 3:
            asked.set()
            held.wait(60)
        return nothing(messages)

    out = tmp_path / "scores.jsonl"
    words = ["run", "--task", LEGS, "-n", "20", "--at-once", "1", "--out", str(out)]
    with (
        model_server(slow) as url,
        subprocess.Popen(
            [sys.executable, "-m", "bombus", *words, "--engine", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_the_terminal,
        ) as program,
    ):
        assert asked.wait(60)
        program.send_signal(number)
        printed, complaints = program.communicate(timeout=60)
        held.set()
    assert program.returncode == code
    assert "scripted: 3 of 20 episodes" in printed
    assert "Traceback" not in complaints
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 3


async def test_a_hive_is_told_from_a_server_whose_model_answers_anybody(bus: Bus) -> None:
    async with gateway_hive(bus) as served:
        command = [sys.executable, "-m", "bombus", "run", "--task", "search", "--engine", served.base_url, "-n", "1"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("is a hive, whose model answers only within episodes: use `bombus eval`\n")


def test_the_listing_has_every_family_and_marks_what_is_flawed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"reasoning_gym:<name> +105 names, {len(FLAWS)} of them flawed", printed)
    assert main(["tasks", "reasoning_gym"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert LEGS in lines
    assert "reasoning_gym:rush_hour  (its own gold answers score 0)" in lines
    assert "reasoning_gym:game_of_life_halting  (its verifier treats any answer as True)" in lines
    assert main(["tasks", "search"]) == 0
    options = capsys.readouterr().out.splitlines()[-1]
    assert options.startswith("--set NAME=VALUE of `bombus run`: documents, format_score, max_turns, questions, ")
    assert main(["tasks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["family"] == "reasoning_gym"
    assert listed[0]["installed"] is True
    assert main(["tasks", "chess"]) == 2
