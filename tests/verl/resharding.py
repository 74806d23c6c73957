"""What ranks find that go on from checkpoints of another number of ranks: the step after, and the weights."""

import json
from pathlib import Path

from bombus_trainer.backends.verl.executor import VerlExecutor
from bombus_trainer.publish.export import VersionTarget, export
from bombus_trainer.ranks import Ranks
from tests.trainer.small_batches import tiny_settings
from tests.verl.given import facts, groups, model_folder
from tests.verl.processes import on_ranks

CASES: dict[str, dict[str, object]] = {
    "all weights": {"weight_decay": 0.1},
    "tied": {"weight_decay": 0.1},
    "an adapter": {"lora_rank": 4, "lora_alpha": 8},
}
Found = dict[str, object]


def compute(folder: Path, ranks: Ranks) -> Found:
    """Make two steps with a checkpoint between them, and the second step from each checkpoint that is there already."""
    return {case: made(folder, case, ranks) for case in CASES}


def made(folder: Path, case: str, ranks: Ranks) -> Found:
    chosen = tiny_settings(**CASES[case])
    model = model_folder(folder / case) if case == "tied" else model_folder(folder)
    place = folder / "checkpoints" / case
    there = sorted(place.glob("*.json"))
    ranks.agree(True)  # all have looked before any of them writes
    found: Found = {}
    for path in there:
        before = json.loads(path.read_text())
        again = VerlExecutor(model, chosen, ranks)
        again.restore(Path(before["path"]), before["digest"])
        found[path.stem] = second(again, ranks, folder / f"from {path.stem} to {ranks.size}" / case)
    straight = VerlExecutor(model, chosen, ranks)
    straight.train_step(groups(1), 1)
    saved = straight.save(place / str(ranks.size), facts(1))
    if ranks.leads:
        (place / f"{ranks.size}.json").write_text(json.dumps({"path": str(saved.path), "digest": saved.digest}))
    found["straight"] = second(straight, ranks, folder / f"of {ranks.size}" / case)
    return found


def second(backend: VerlExecutor, ranks: Ranks, folder: Path) -> Found:
    """Make the second step. The leader returns the metrics, and where the weights are."""
    metrics = backend.train_step(groups(2), 2)
    if not ranks.leads:
        backend.gather_weights()
        return {}
    weights = export(backend, VersionTarget(folder, 2, 1))
    return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "where": weights.where}


if __name__ == "__main__":
    on_ranks(compute)
