"""What the scripted model says: it writes a program, reads it, runs it and looks at the result. Pure.

It sees what a model sees, the text of its prompt, and chooses among the tools that the harness shows there.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TASK = (
    "Work in the folder {workspace} . Write a program squares.py there which prints the squares of 1 to 5, read it, "
    "run it so that its output is in squares.txt, look at both files, and say that you are done."
)
PROGRAM = "for number in range(1, 6):\n    print(number, number * number)\n"
OUTPUT = "".join(f"{number} {number * number}\n" for number in range(1, 6))
DONE = "Done: squares.txt has the squares of 1 to 5."
TITLE = "Squares of five numbers"

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_FOLDER = re.compile(r"Work in the folder (\S+) \. Write a program")

# The names that harnesses have for a tool, and for what it takes.
WRITERS = ("Write", "write", "write_file")
READERS = ("Read", "read", "read_file")
SHELLS = ("Bash", "bash", "run_shell_command", "exec_command", "terminal", "shell")
FINISHERS = ("finish", "final_answer")
PATHS = ("file_path", "filePath", "absolute_path", "path")
CONTENTS = ("content", "file_text")
COMMANDS = ("command", "cmd")
ANSWERS = ("message", "answer")
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what mini-swe-agent wants to see as the output of the last command


@dataclass(frozen=True)
class Shown:
    """A prompt as the model sees it. `tools` has the schema of each tool's parameters."""

    turns: Sequence[tuple[str, str]]
    tools: Mapping[str, Mapping[str, Any]]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.turns)

    @property
    def folder(self) -> str:
        """The folder of the task; empty in a call that is not about the task."""
        found = [match[1] for _, text in self.turns for match in _FOLDER.finditer(text)]
        return found[0] if found else ""

    @property
    def answers(self) -> int:
        """How many answers come after the task."""
        first = next((at for at, (_, text) in enumerate(self.turns) if _FOLDER.search(text)), 0)
        return sum(role == "assistant" for role, _ in self.turns[first:])


def shown(prompt: str) -> Shown:
    """Read a prompt in ChatML whose tools are described as Hermes does."""
    turns = [(match[1], match[2]) for match in _TURN.finditer(prompt)]
    return Shown(turns, dict(_tools(turns)))


def _tools(turns: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    described = _TOOLS.findall(turns[0][1]) if turns else []
    for line in described[-1].splitlines() if described else ():
        function = json.loads(line)["function"]
        yield function["name"], function.get("parameters") or {}


def answer(prompt: Shown) -> str:
    """Return what the model says next."""
    if prompt.tools:
        return _answer_with_tools(prompt)
    if "<code>" in prompt.text and "final_answer" in prompt.text:
        return _answer_with_code(prompt)
    if prompt.folder and "```" in prompt.text:
        return _answer_with_files(prompt)
    return TITLE


def _answer_with_tools(prompt: Shown) -> str:
    folder, number = prompt.folder, prompt.answers
    program, output = f"{folder}/squares.py", f"{folder}/squares.txt"
    match number:
        case 0:
            return "I write the program.\n" + _call(*_writing(prompt, program))
        case 1:
            return _call(*_reading(prompt, program))
        case 2:
            return "Now I run it.\n\n" + _call(*_running(prompt, f"python3 {program} > {output}"))
        case 3:
            listing = _running(prompt, f"cat {output}")
            return "\n".join([_call(*listing), _call(*_reading(prompt, program))])
        case _:
            return _finishing(prompt)


def _writing(prompt: Shown, path: str) -> tuple[str, dict[str, Any]]:
    name = _first(prompt.tools, WRITERS)
    if name:
        return name, _arguments(prompt.tools[name], {PATHS: path, CONTENTS: PROGRAM})
    return _running(prompt, f"cat > {path} <<'EOF'\n{PROGRAM}EOF")


def _reading(prompt: Shown, path: str) -> tuple[str, dict[str, Any]]:
    name = _first(prompt.tools, READERS)
    if name:
        return name, _arguments(prompt.tools[name], {PATHS: path})
    return _running(prompt, f"cat {path}")


def _running(prompt: Shown, command: str) -> tuple[str, dict[str, Any]]:
    name = _first(prompt.tools, SHELLS)
    return name, _arguments(prompt.tools[name], {COMMANDS: command})


def _finishing(prompt: Shown) -> str:
    name = _first(prompt.tools, FINISHERS)
    if name:
        return _call(name, _arguments(prompt.tools[name], {ANSWERS: DONE}))
    if SUBMIT in prompt.text:
        return _call(*_running(prompt, f"echo {SUBMIT}"))
    return DONE


def _first(tools: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if name in tools), "")


def _arguments(schema: Mapping[str, Any], given: Mapping[Sequence[str], str]) -> dict[str, Any]:
    """Return arguments by the names that the tool has for them, and something for the others that it requires."""
    properties = schema.get("properties") or {}
    found = {_first(properties, names): value for names, value in given.items()}
    missing = [name for name in schema.get("required") or () if name not in found]
    return found | {name: _any_value(properties[name]) for name in missing}


def _any_value(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    return {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}.get(
        schema.get("type", ""), "squares"
    )


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _answer_with_code(prompt: Shown) -> str:
    """Answer smolagents' CodeAgent, whose actions are Python in <code> tags."""
    folder = prompt.folder
    program, output = f"{folder}/squares.py", f"{folder}/squares.txt"
    steps = [
        f"print(shell({_heredoc(program)!r}))",
        f"print(shell('cat {program}'))",
        f"print(shell('python3 {program} > {output}'))",
        f"print(shell('cat {output}'))",
        f"final_answer({DONE!r})",
    ]
    step = steps[min(prompt.answers, len(steps) - 1)]
    return f"Thought: this is step {prompt.answers + 1}.\n<code>\n{step}\n</code>"


def _heredoc(path: str) -> str:
    return f"cat > {path} <<'EOF'\n{PROGRAM}EOF"


def _answer_with_files(prompt: Shown) -> str:
    """Answer aider, which takes whole files: its test accepts the fourth of them.

    Only answers with the file count: aider puts others between them, which nobody has sampled.
    """
    number = sum(role == "assistant" and PROGRAM[:20] in text for role, text in prompt.turns)
    lines = PROGRAM if number >= 3 else PROGRAM.replace("6", str(2 + number))
    return f"squares.py\n```\n{lines}```"
