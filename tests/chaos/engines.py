"""The engines of a run: one waits for its weights, which are in a folder; the other samples on, and gets objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bombus import Job
from bombus.machine.process import free_port

LENGTHS = {
    "max_prompt_length": 256,
    "max_response_length": 200,
    "max_response_length_in_one_turn": 64,
    "max_model_len": 512,
}


@dataclass(frozen=True)
class ChaosEngine:
    """An engine, and how it is run. `trainer` are settings of its trainer's process."""

    name: str
    replicas: int
    max_staleness: int
    trainer: Mapping[str, object] = field(default_factory=dict)

    def job(self) -> Job:
        return Job(
            model="tiny",
            batch_size=2,
            num_repeat=4,
            lr=1e-3,
            bombus={
                "model": {"dtype": "float32"},
                "collection": {"max_staleness": self.max_staleness, "replay_steps": 10_000},  # the audit reads all
                "rollout": LENGTHS,
            },
        )

    def part(self, broken_replica: bool) -> dict[str, Any]:
        """Return the engine's part of a cluster file. A broken replica stands for a server that is not there."""
        kinds: list[dict[str, object]] = [{"count": self.replicas, "threads": 1}]
        if broken_replica:
            kinds.append({"backend": "openai", "url": f"http://127.0.0.1:{free_port()}"})
        return {"trainer": {"threads": 1, **self.trainer}, "inference": kinds}


LEFT = ChaosEngine("left", replicas=2, max_staleness=0)
RIGHT = ChaosEngine("right", replicas=1, max_staleness=1, trainer={"weights_by": "objects", "weights_full_every": 4})
ENGINES = (LEFT, RIGHT)


def cluster(port: int, data: Path, broken_replica: bool) -> dict[str, Any]:
    """Return the cluster file of a run, whose first engine may have a replica that never loads."""
    return {
        "data_dir": str(data),
        "gateway": {"port": port, "count": 2},
        "coordinator": {"count": 2},
        "engines": {engine.name: engine.part(broken_replica and engine is LEFT) for engine in ENGINES},
    }
