"""What the scripted model says depends on what a harness shows."""

import json
import re
from typing import Any

import pytest

from tests.harnesses.player import DONE, PROGRAM, SUBMIT, TASK, TITLE, answer, shown

FOLDER = "/tmp/squares"
QUESTION = {"role": "user", "content": "Please. " + TASK.format(workspace=FOLDER)}


def tool(name: str, *parameters: str, **more: Any) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in parameters} | more
    return {"function": {"name": name, "parameters": {"properties": properties, "required": list(properties)}}}


def said(messages: list[dict[str, Any]], *tools: dict[str, Any], system: str = "You are a bee.") -> str:
    described = "\n".join(json.dumps(each) for each in tools)
    start = f"{system}\n\n<tools>\n{described}\n</tools>\n" if tools else system
    turns = [{"role": "system", "content": start}, *messages]
    return answer(shown("".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in turns)))


def calls(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)]


def after(number: int) -> list[dict[str, Any]]:
    """Return the task and so many answers to it."""
    return [QUESTION, *({"role": role, "content": "..."} for _ in range(number) for role in ("assistant", "user"))]


def test_it_uses_the_tools_by_the_names_that_the_harness_has_for_them() -> None:
    tools = (tool("Write", "file_path", "content"), tool("Read", "file_path"), tool("Bash", "command", "description"))
    (writing,) = calls(said(after(0), *tools))
    assert writing == {"name": "Write", "arguments": {"file_path": f"{FOLDER}/squares.py", "content": PROGRAM}}
    (reading,) = calls(said(after(1), *tools))
    assert reading == {"name": "Read", "arguments": {"file_path": f"{FOLDER}/squares.py"}}
    (running,) = calls(said(after(2), *tools))
    assert running["name"] == "Bash"
    assert running["arguments"]["command"] == f"python3 {FOLDER}/squares.py > {FOLDER}/squares.txt"
    assert running["arguments"]["description"], "required, so it is given"
    assert [call["name"] for call in calls(said(after(3), *tools))] == ["Bash", "Read"]
    assert said(after(4), *tools) == DONE


def test_a_shell_alone_is_enough() -> None:
    (writing,) = calls(said(after(0), tool("exec_command", "cmd", yield_time_ms={"type": "integer"})))
    assert writing["arguments"]["cmd"].startswith(f"cat > {FOLDER}/squares.py")
    assert writing["arguments"]["yield_time_ms"] == 1


@pytest.mark.parametrize(("name", "parameter"), [("finish", "message"), ("final_answer", "answer")])
def test_it_ends_with_the_tool_that_ends_where_there_is_one(name: str, parameter: str) -> None:
    assert calls(said(after(4), tool("shell", "command"), tool(name, parameter))) == [
        {"name": name, "arguments": {parameter: DONE}}
    ]


def test_it_says_the_word_with_which_mini_swe_agent_ends() -> None:
    (ending,) = calls(said(after(4), tool("bash", "command"), system=f"End with `echo {SUBMIT}`."))
    assert ending["arguments"] == {"command": f"echo {SUBMIT}"}


def test_it_counts_the_answers_after_the_task_and_not_those_of_examples() -> None:
    examples = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    assert said([*examples, *after(0)], system="Answer with ``` and whole files").endswith(
        "range(1, 2):\n" + "    print(number, number * number)\n```"
    )
    files = [{"role": "assistant", "content": f"squares.py\n```\n{PROGRAM}```"}] * 3
    assert PROGRAM in said([*examples, *after(0), *files], system="Answer with ``` and whole files")


def test_a_call_without_the_task_and_without_tools_gets_a_title() -> None:
    assert said([{"role": "user", "content": "Name this conversation."}]) == TITLE


def test_code_is_answered_with_code() -> None:
    text = said(after(0), system="Write <code> and use final_answer")
    assert text.startswith("Thought:")
    assert text.endswith("</code>")
