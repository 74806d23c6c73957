"""Commands with fields."""

from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.rollout.commands import check_fields, check_program, parse_command
from bombus.rollout.tasks import AgentTask

TASK = AgentTask(task_id="a", prompt='say "hi"; rm -rf $HOME', fields={"issue": 17})


def test_a_field_becomes_part_of_one_argument_whatever_is_in_it() -> None:
    command = parse_command("claude -p {prompt} --note 'issue {issue} of {task_id}'", "--agent")
    assert command.filled(TASK.words()) == ["claude", "-p", TASK.prompt, "--note", "issue 17 of a"]
    assert command.fields() == {"prompt", "issue", "task_id"}


def test_what_is_in_a_field_is_not_read_again() -> None:
    command = parse_command("echo {prompt}", "--agent")
    assert command.filled({"prompt": "{task_id} {{x}}"}) == ["echo", "{task_id} {{x}}"]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("sh -c 'echo ${HOME} $1'", ["sh", "-c", "echo ${HOME} $1"]),
        ("awk '{{print}}'", ["awk", "{print}"]),
        ("awk '{ print $1 }'", ["awk", "{ print $1 }"]),
        ("""curl -d '{"a": {"b": 1}}'""", ["curl", "-d", '{"a": {"b": 1}}']),
    ],
)
def test_braces_that_are_no_field_stay(typed: str, words: list[str]) -> None:
    command = parse_command(typed, "--agent")
    assert command.fields() == set()
    assert command.filled({}) == words


def test_a_field_that_a_task_lacks_is_refused_with_those_it_has() -> None:
    other = AgentTask(task_id="b", prompt="p")
    command = parse_command("agent {prompt} {issue} {workspace}", "--agent")
    check_fields(command, [TASK])
    with pytest.raises(Refused) as refused:
        check_fields(command, [TASK, other])
    assert refused.value.why == (
        "--agent has the field {issue}, which task b does not have; it has folder, prompt, task_id, workspace. Write "
        "{{issue}} if the command itself needs {issue}"
    )


@pytest.mark.parametrize("braces", ["{test-file}", "{meta.answer}", "{meta[answer]}", "--file={test-file}"])
def test_what_is_nearly_a_field_is_refused(braces: str) -> None:
    task = AgentTask(task_id="c", prompt="p", fields={"test-file": "tests/a.py", "meta": {"answer": 4}})
    with pytest.raises(Refused, match=r"--reward has \{(test-file|meta.*answer.?)\}, which is not a field"):
        check_fields(parse_command(f"./check.sh '{braces}'", "--reward"), [task])
    check_fields(parse_command("awk '{ meta }' '{other.x}' '{{{{test-file}}}}' '${{meta.x}}'", "--reward"), [task])


def program(path: Path, text: bytes, mode: int = 0o755) -> None:
    path.write_bytes(text)
    path.chmod(mode)


def test_a_program_that_no_episode_could_run_is_refused(tmp_path: Path) -> None:
    def why(command: str) -> str:
        with pytest.raises(Refused) as refused:
            check_program(parse_command(command, "--reward"), tmp_path)
        return refused.value.why

    program(tmp_path / "well.sh", b"#!/bin/sh\nexit 0\n")
    program(tmp_path / "env.py", b"#! /usr/bin/env python3\n")
    program(tmp_path / "binary", b"\x7fELF\0\0")
    for name in ("./well.sh", "./env.py", "./binary", "sh", f"{tmp_path}/well.sh", "./{name}"):
        check_program(parse_command(name, "--reward"), tmp_path)
    program(tmp_path / "plain.sh", b"#!/bin/sh\n", 0o644)
    program(tmp_path / "bare.sh", b"exit 0\n")
    program(tmp_path / "windows.sh", b"#!/bin/sh\r\nexit 0\r\n")
    program(tmp_path / "other.sh", b"#!/no/such/shell -e\n")
    assert "plain.sh cannot be run: it is not executable" in why("./plain.sh")
    assert "bare.sh cannot be run: its first line does not name" in why("./bare.sh")
    assert "its first line ends with a carriage return" in why("./windows.sh")
    assert "names the interpreter '/no/such/shell', which this machine cannot run" in why("./other.sh")
    assert why(f"{tmp_path}") == f"--reward: {tmp_path} cannot be run: it is not a file"
    assert why("../check.sh") == (
        "--reward: ../check.sh is outside the workspace, but episodes run in copies of the workspace: give an "
        "absolute path"
    )
    assert why("/no/judge") == "--reward: there is no program /no/judge on this machine"


def test_a_command_with_bytes_that_are_not_utf8_is_refused() -> None:
    with pytest.raises(Refused, match=r"--agent '/ag\\udce9nt.sh' has bytes that are not UTF-8"):
        parse_command("/ag\udce9nt.sh", "--agent")


def test_a_command_that_cannot_be_split_or_is_empty_is_refused() -> None:
    with pytest.raises(Refused, match=r"--reward .* cannot be split into words: No closing quotation"):
        parse_command("echo 'half", "--reward")
    with pytest.raises(Refused, match="--reward is empty"):
        parse_command(" ", "--reward")
