"""Task folders in Harbor's format, made by tests."""

from pathlib import Path

AGENT = (Path(__file__).parents[1] / "agent.py").read_text()
JUDGE = "grep -q ok /app/answer.txt && echo 0.75 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def task_folder(
    path: Path, toml: str = "", *, test: str = JUDGE, dockerfile: str | None = None, instruction: str = "the quick\n"
) -> Path:
    """Make a task folder whose agent finds `agent.py`, unless it has a Dockerfile."""
    for name in ("environment", "tests", "solution"):
        (path / name).mkdir(parents=True)
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text(instruction)
    (path / "tests/test.sh").write_text(f"#!/bin/sh\n{test}\n")
    (path / "solution/solve.sh").write_text("echo ok > answer.txt\n")
    (path / "environment/agent.py").write_text(AGENT)
    if dockerfile is not None:
        (path / "environment/Dockerfile").write_text(dockerfile)
    return path
