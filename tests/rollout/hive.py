"""What tests of rollouts share: a workspace, tasks, and a rollout in this process against a hive."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bombus import AsyncSwarmClient
from bombus.rollout.plan import RolloutOptions, plan_of
from bombus.rollout.records import LostEpisode, PlayedEpisode, RolloutTally
from bombus.rollout.run import RolloutListener, RolloutRun
from bombus.rollout.tasks import AgentTask

AGENT = f"{sys.executable} -I -S {Path(__file__).parent / 'agent.py'}"
JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": "models/bumble", "tools": "hermes"},
        "rollout": {
            "num_repeat": 2,
            "max_prompt_length": 500,
            "max_response_length": 1500,
            "max_response_length_in_one_turn": 64,
        },
        "collection": {"batch_size": 2},
    }
}


def write_tasks(folder: Path, *tasks: dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def repository(folder: Path, check: str = "grep -q ok answer.txt && echo 0.75") -> Path:
    """Make a workspace whose reward command is `check`."""
    workspace = folder / "repo"
    workspace.mkdir()
    (workspace / "check.sh").write_text(f"#!/bin/sh\n{check}\n")
    (workspace / "check.sh").chmod(0o755)
    return workspace


class Heard(RolloutListener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[PlayedEpisode | LostEpisode] = []

    def finished(self, task: AgentTask, result: PlayedEpisode | LostEpisode, tally: RolloutTally) -> None:
        self.results.append(result)


class Rolled:
    """A rollout of a folder with a task file and a workspace, whose options are keywords."""

    def __init__(self, folder: Path, client: AsyncSwarmClient, repeat: int = 1, **options: Any) -> None:
        given = {
            "task": folder / "tasks.jsonl",
            "workspace": folder / "repo",
            "agent": f"{AGENT} {{prompt}} 1",
            "reward": "./check.sh",
            "scratch": folder,
            "out": folder / "out",
            **options,
        }
        self.folder = folder
        self.heard = Heard()
        self.rollout = RolloutRun(plan_of(RolloutOptions(**given)), client, repeat, self.heard)

    async def run(self) -> RolloutTally:
        await self.rollout.run()
        return self.rollout.tally

    def records(self) -> Sequence[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out" / "episodes.jsonl").read_text().splitlines()]

    def left_over(self) -> Iterator[Path]:
        return self.folder.glob("bombus-rollout-*")
