"""Reads samples back from the files that a trainer writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bombus_trainer.data.samples import Sample, Status


def load_samples(path: str | Path) -> list[Sample]:
    """Return the samples of a `.pt` file. It is loaded with `weights_only=True`: nothing in it can run code."""
    return [sample_of(values) for values in torch.load(path, weights_only=True)["samples"]]


def sample_of(values: Mapping[str, Any]) -> Sample:
    return Sample(**{**values, "status": Status(values["status"])})
