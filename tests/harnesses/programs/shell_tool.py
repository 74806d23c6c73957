"""The tool of the agents in this folder, and how it is described to a model."""

import subprocess
from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command."}},
    "required": ["command"],
}


def shell(command: str) -> str:
    """Run a command in a shell and return its output.

    Args:
        command: The command.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr
