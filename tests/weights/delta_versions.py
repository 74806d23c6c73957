"""Writes policy versions of any tensors as a trainer does: the first in full, each of the others as a delta."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from bombus.hive.events import Weights
from bombus.weights.checkpoints import Seal
from bombus.weights.deltas import DELTA_FILE, DELTA_FORMAT, FULL_FILE
from bombus_trainer.publish.export import METADATA, write_delta
from bombus_trainer.publish.host_copy import Changes, HostCopy
from bombus_trainer.publish.tensorfile import shapes_of, write_tensors, write_whole

Tensors = Mapping[str, Tensor]


def write_full(path: Path, tensors: Tensors) -> Seal:
    return write_whole(path, tensors, durable=False, metadata=METADATA)


def write_versions(root: Path, versions: Sequence[Tensors]) -> list[Weights]:
    """Write version k into folder `k` below `root`, and return what the log says of each."""
    held = HostCopy()
    made: list[Weights] = []
    for version, tensors in enumerate(versions):
        folder = root / str(version)
        folder.mkdir(parents=True)
        changes = Changes(1 << 40)
        full_path = Path(os.devnull) if made else folder / FULL_FILE
        shapes = shapes_of(tensors)
        following = held.follow(tensors.items(), changes)
        full = write_tensors(full_path, shapes, following, durable=False, metadata=METADATA)
        weights = Weights(where=str(folder), bytes=full.bytes, sha256=full.sha256)
        if made:
            delta = write_delta(folder / DELTA_FILE, changes.patches, shapes, made[-1])
            weights = Weights(
                where=str(folder),
                format=DELTA_FORMAT,
                bytes=full.bytes,
                sha256=full.sha256,
                base=version - 1,
                delta_bytes=delta.bytes,
                delta_sha256=delta.sha256,
            )
        made.append(weights)
    return made
