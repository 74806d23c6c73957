"""What ranks find that go on from checkpoints of another number of ranks: the step after, and the weights."""

import json
from hashlib import sha256
from pathlib import Path

from bombus.errors import EngineFault
from bombus_trainer.backends.verl.executor import STATE, VerlExecutor
from bombus_trainer.publish import checkpoint
from bombus_trainer.publish.checkpoint import MANIFEST, Saved
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
    found: Found = {case: made(folder, case, ranks) for case in CASES}
    found["verl's own"] = verls_own(folder, ranks)
    return found


def made(folder: Path, case: str, ranks: Ranks) -> Found:
    chosen = tiny_settings(**CASES[case])
    model = model_folder(folder / case) if case == "tied" else model_folder(folder)
    place = folder / "checkpoints" / case
    there = sorted(place.glob("*.json"))
    ranks.agree(True)  # all have looked before any of them writes
    found: Found = {}
    for path in there:
        saved = Saved(**json.loads(path.read_text()))
        again = VerlExecutor(model, chosen, ranks)
        again.restore(Path(saved.path), saved.digest)
        found[path.stem] = second(again, ranks, folder / f"from {path.stem} to {ranks.size}" / case)
    straight = VerlExecutor(model, chosen, ranks)
    straight.train_step(groups(1), 1)
    saved = straight.save(place / str(ranks.size), facts(1))
    if ranks.leads:
        (place / f"{ranks.size}.json").write_text(json.dumps({"path": saved.path, "digest": saved.digest}))
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


def verls_own(folder: Path, ranks: Ranks) -> Found:
    """Go on from files as verl itself writes them, which checkpoints had before, also as ranks that cannot."""
    chosen = tiny_settings()
    straight = VerlExecutor(model_folder(folder), chosen, ranks)
    straight.train_step(groups(1), 1)

    def write(draft: Path) -> dict[str, checkpoint.Seal]:
        directory: str = ranks.share(str(draft / STATE))
        straight._engine.save_checkpoint(directory, global_step=1)
        seals: dict[str, checkpoint.Seal] = {}
        for each in ranks.gather(checkpoint.seal_files(Path(directory).parent, straight._is_ours)):
            seals |= each
        return seals

    saved = None
    if ranks.leads:
        saved = checkpoint.save_files(folder / f"verls-{ranks.size}", facts(1), "verl", ranks.size, write)
    else:
        write(Path())
    saved = ranks.share(saved)
    digest = ranks.share(as_before(Path(saved.path), ranks.size) if ranks.leads else None)
    again = VerlExecutor(model_folder(folder), chosen, ranks)
    again.restore(Path(saved.path), digest)
    found: Found = {
        "straight": straight.train_step(groups(2), 2)["loss"],
        "again": again.train_step(groups(2), 2)["loss"],
    }
    of_others = ranks.share(as_before(Path(saved.path), ranks.size + 1) if ranks.leads else None)
    try:
        again.restore(Path(saved.path), of_others)
    except EngineFault as error:
        found["refusal"] = str(error)
    return found


def as_before(path: Path, ranks: int) -> str:
    """Have a manifest say what such checkpoints said, written by that many ranks, and return its digest."""
    manifest = json.loads((path / MANIFEST).read_text()) | {"ranks": ranks}
    manifest.pop("reshards", None)
    (path / MANIFEST).write_text(json.dumps(manifest))
    return sha256((path / MANIFEST).read_bytes()).hexdigest()


if __name__ == "__main__":
    on_ranks(compute)
