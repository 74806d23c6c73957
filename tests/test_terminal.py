"""What bombus prints and logs: no text from elsewhere forges a line or controls the terminal."""

import asyncio
import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bombus.bus import Bus
from bombus.cli import OUTPUT_CLOSED
from bombus.logs import JsonFormatter, LineFormatter
from bombus.terminal import escaped, json_escaped, say, say_json
from tests.gateway.swarm_hive import played_hive
from tests.logs.facts import TINY
from tests.overwatch.story import rolling
from tests.overwatch.test_service import publish

CLEAR, C1, RIGHT_TO_LEFT = "\x1b[2J", "\x9b31m", "\u202e"
FORGED = f"a\n12:00:00 coordinator  run 2 failed{CLEAR}{C1}{RIGHT_TO_LEFT}\x7f"


def is_safe(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def record(message: str, **extra: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "levelno": logging.INFO, "levelname": "INFO", **extra})


@pytest.mark.parametrize("text", [FORGED, "\ud800", "\u2028", "\r", "\t", "\x00"])
def test_what_is_not_printable_is_spelled_out_in_one_line(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped("plain, and größer ✓") == "plain, and größer ✓"
    assert escaped("a\nb\x1b") == r"a\nb\x1b"


def test_each_argument_of_say_is_one_line() -> None:
    out = io.StringIO()
    say("first", FORGED, 3, file=out)
    first, second, third, end = out.getvalue().split("\n")
    assert (first, third, end) == ("first", "3", "")
    assert second.startswith(r"a\n12:00:00")
    assert second.isprintable()


def test_colours_are_kept_only_in_lines_that_are_styled() -> None:
    line = f"\x1b[31;1mred\x1b[0m {CLEAR}"
    for styled, shown in ((True, "\x1b[31;1mred\x1b[0m \\x1b[2J\n"), (False, "\\x1b[31;1mred\\x1b[0m \\x1b[2J\n")):
        out = io.StringIO()
        say(line, styled=styled, file=out)
        assert out.getvalue() == shown


def test_json_keeps_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"task": FORGED, "name": "größer", "astral": "\U000e0001"}
    say_json(value)
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert "größer" in printed
    assert json.loads(printed) == value == json.loads(json_escaped(json.dumps(value, ensure_ascii=False)))


# ---- logs -------------------------------------------------------------------------------------------------------


def test_a_message_and_its_fields_are_one_log_line() -> None:
    line = LineFormatter(colour=False).format(record(f"key {FORGED} has no effect", client=FORGED, episode="main-1-1"))
    assert line.isprintable()
    assert line.endswith("episode=main-1-1 client=" + line.partition("client=")[2])
    (parsed,) = [json.loads(JsonFormatter().format(record(FORGED, client=FORGED)))]
    assert parsed["message"] == parsed["client"] == FORGED
    assert is_safe(JsonFormatter().format(record(FORGED, client=FORGED)))


def test_a_field_is_not_taken_for_two() -> None:
    line = LineFormatter(colour=False).format(record("claimed", client="c1 engine=other"))
    assert line.endswith('client="c1 engine=other"')


def test_the_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        line = LineFormatter(colour=False).format(record("failed", exc_info=sys.exc_info()))
    assert is_safe(line)
    first, *rest = line.split("\n")
    assert first.endswith("failed")
    assert all(each.startswith("    ") for each in rest)


def test_the_error_that_ends_a_process_is_logged_like_any_other() -> None:
    code = f"from bombus import logs; logs.configure('trainer'); raise RuntimeError({FORGED!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert is_safe(ended.stderr)
    first, *rest = ended.stderr.rstrip("\n").split("\n")
    assert "trainer" in first
    assert "critical: this process ends" in first
    assert all(line.startswith("    ") for line in rest)
    assert "RuntimeError: a" in ended.stderr


# ---- commands ---------------------------------------------------------------------------------------------------


async def test_no_client_reaches_the_terminal_through_status_or_replay(bus: Bus, nats_url: str, tmp_path: Path) -> None:
    """A client's name, a task's name and metadata come from whoever can claim an episode."""
    async with played_hive(bus) as played:
        await played.start()
        claim = {"client_uuid": FORGED, "episode_type": "train", "throttle_policy": {"current_task_id": FORGED}}
        episode = (await played.post("/claim_episode", claim)).json()["episode_uuid"]
        await played.call(episode, ({"role": FORGED, "content": FORGED},), FORGED)
        await played.post("/claim_episode", claim)
        outcome = {"reward": 1.0, "metadata": {FORGED: FORGED}, "log_metrics": {FORGED: 1.0}}
        ended = {"client_uuid": FORGED, "episode_uuid": episode, "task_id": FORGED, "workflow_output": outcome}
        assert (await played.post("/end_episode", ended)).json() == {"success": True}
        where = ["--nats", nats_url, "--hive", bus.subjects.hive]
        for words in (
            ["status"],
            ["status", "--json"],
            ["replay", "timeline"],
            ["replay", "timeline", "--json"],
            ["replay", "state"],
            ["replay", "diff", "1", "5"],
            ["replay", "diff", "1", "5", "--json"],
            ["replay", "episode", episode],
            ["replay", "episode", FORGED],
        ):
            command = [sys.executable, "-m", "bombus", *words, *where]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120, cwd=tmp_path)
            text = (done.stdout + done.stderr).decode()
            assert text, words
            assert is_safe(text), words
            assert not any(line.startswith("12:00:00") for line in text.split("\n")), words


async def test_a_status_has_the_time_at_which_it_is_shown_and_not_that_of_the_last_event(
    bus: Bus, nats_url: str
) -> None:
    async with played_hive(bus) as played:
        await played.start()
        command = [sys.executable, "-m", "bombus", "status", "--json", "--nats", nats_url, "--hive", bus.subjects.hive]
        asked_ns = time.time_ns()
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120, check=True)
        assert json.loads(done.stdout)["now_ns"] > asked_ns


async def test_the_text_of_a_status_says_how_long_ago_things_happened(bus: Bus, nats_url: str) -> None:
    await publish(bus, rolling(1).events)  # of a day in the past
    command = [sys.executable, "-m", "bombus", "status", "--nats", nats_url, "--hive", bus.subjects.hive]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r": ROLLING for \d+ d", done.stdout)


@pytest.mark.parametrize("words", [["tasks"], ["replay", "state", "--log", str(TINY)]])
def test_a_command_whose_output_nobody_reads_any_more_ends_without_a_traceback(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bombus", *words], stdout=writing, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (OUTPUT_CLOSED, b"")


def test_doctor_shows_a_hostile_file_name_harmlessly(tmp_path: Path) -> None:
    path = tmp_path / f"{CLEAR}\nmissing.yaml"
    command = [sys.executable, "-m", "bombus", "doctor", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert is_safe(done.stderr.decode())
    path.write_text(f"'ajet{CLEAR}':\n  a: 1\n'{CLEAR}b': {{}}\n")
    done = subprocess.run(command, capture_output=True, timeout=60, cwd=tmp_path)
    assert is_safe((done.stdout + done.stderr).decode())
