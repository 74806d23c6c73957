"""Rollouts as files: those that slime itself reads and writes (.pt), and JSON lines."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from bombus.errors import Code, Refused, in_one_line
from bombus.slime.types import SlimeSample

TORCH_ENDING = ".pt"


def rollout_file(template: str, rollout_id: int) -> Path:
    """Return the file of a rollout: `{rollout_id}` stands for its number. Raises `Refused`."""
    try:
        return Path(template.format(rollout_id=rollout_id))
    except (KeyError, IndexError, ValueError) as error:
        why = f"{template!r} names no file: write {{rollout_id}} where the number goes, and no other braces"
        raise Refused(Code.BAD_CONFIG, why) from error


def save_rollout(path: Path, rollout_id: int, samples: Sequence[Any]) -> None:
    """Write the samples of a rollout to a file of that name, which is replaced whole."""
    rows = [sample.to_dict() for sample in samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    if path.suffix == TORCH_ENDING:
        import torch

        torch.save({"rollout_id": rollout_id, "samples": rows}, partial)
    else:
        lines = (msgspec.json.encode({"rollout_id": rollout_id, **row}) for row in rows)
        partial.write_bytes(b"".join(line + b"\n" for line in lines))
    partial.replace(path)


def check_can_save(template: str) -> None:
    """Raises `Refused` where the files cannot be written, before anything is played."""
    if rollout_file(template, 0).suffix == TORCH_ENDING and find_spec("torch") is None:
        raise Refused(Code.BAD_CONFIG, f"{template} needs torch: install it, or name a file that ends in .jsonl")


def load_rollout(path: Path) -> list[SlimeSample]:
    """Return the samples of a file. Code in a .pt file is never run. Raises `Refused`."""
    try:
        if path.suffix == TORCH_ENDING:
            import torch

            rows: Iterable[Any] = torch.load(path, weights_only=True)["samples"]
        else:
            rows = map(msgspec.json.decode, path.read_bytes().splitlines())
        return [SlimeSample.from_dict(row) for row in rows]
    except Exception as error:  # whatever a damaged file makes of its reader
        raise Refused(Code.BAD_CONFIG, f"{path} cannot be read as a rollout: {in_one_line(error)}") from error
