"""The options of a trainer process: its engine, its folders, and the limits of its machine."""

import argparse
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from bombus.cli import add_hive_arguments
from bombus.config.flags import Flag, NoFlag, add_settings_arguments, name_of, settings_from
from bombus.config.parts import Device, EngineName, MetricsOptions, TrainerMachineOptions
from bombus.errors import Code, Refused

OBJECTS_FULL_EVERY = 16


class TrainerOptions(TrainerMachineOptions, MetricsOptions):
    """The options of a trainer process.

    `folder` is for checkpoints and weights. Replicas must see it under the same path, unless weights are published
    through the object store. Jobs may write their debug rollout data to folders under `debug_root`. `retry_s` is the
    pause after a step's first failure; it doubles with each further failure, up to `retry_s_max`. A superseded trainer
    checks every `presence_s` whether its successor is alive. In an operations run, a model gets a recovery checkpoint
    after `checkpoint_s`, or after `checkpoint_bytes` of operations.
    """

    engine: Annotated[EngineName, Flag(metavar="NAME", help="the engine it works for", read=name_of("engine"))] = "main"
    folder: Annotated[
        Path, Flag(metavar="DIR", help="checkpoints and weights; replicas must see it under the same path")
    ] = Field(default=Path(".bombus/engines"), validate_default=True)
    debug_root: Annotated[
        Path | None,
        Flag(
            metavar="DIR",
            help="folder below which jobs may write debug rollout data (default: only below the folder of their run)",
        ),
    ] = None
    device: Device = "cpu"
    operation_timeout_s: Annotated[
        float,
        Flag(
            name="--operation-timeout",
            metavar="SECONDS",
            help="how long ranks wait for each other in a step, a checkpoint or an export",
        ),
    ] = Field(default=1800.0, gt=0.0, le=86_400.0)
    load_patience_s: Annotated[
        float,
        Flag(
            name="--load-patience",
            metavar="SECONDS",
            help="how long a failing load is retried before the run is suspended; job faults end it immediately",
        ),
    ] = Field(default=300.0, ge=0.0, le=86_400.0)
    retry_s: Annotated[float, NoFlag()] = Field(default=1.0, gt=0.0, le=600.0)
    retry_s_max: Annotated[float, NoFlag()] = Field(default=30.0, gt=0.0, le=3600.0)
    checkpoint_s: Annotated[float, NoFlag()] = Field(default=30.0, ge=0.0, le=86_400.0)
    checkpoint_bytes: Annotated[int, NoFlag()] = Field(default=32 << 20, ge=1, le=1 << 40)
    presence_s: Annotated[float, NoFlag()] = Field(default=15.0, gt=0.0, le=3600.0)

    @property
    def silence_s(self) -> float:
        """How long this trainer may be silent before the hive considers it gone: half of `stall_s`. The hive takes 0 to
        mean a day."""
        return self.stall_s / 2

    @property
    def full_every(self) -> int:
        """How often a full copy is published: one version in this many. All other versions are deltas.

        With weights in a folder, the default is 1: hashing a version costs more than reading it from the folder, so
        deltas save nothing.
        """
        return self.weights_full_every or (1 if self.weights_by == "folder" else OBJECTS_FULL_EVERY)

    @field_validator("folder")
    @classmethod
    def _folder_is_absolute(cls, folder: Path) -> Path:
        """Make the path absolute, since files that the log names must be found from any working directory."""
        return folder.absolute()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every rank of a trainer takes."""
    add_hive_arguments(parser)
    add_settings_arguments(parser, TrainerOptions)
    parser.add_argument(
        "--options",
        type=_json_object,
        metavar="JSON",
        help="options as one JSON object, as `bombus up` passes them to its trainers; they override the other flags",
    )


def options_of(arguments: argparse.Namespace) -> TrainerOptions:
    """Return the options given on the command line. Raises `Refused(BAD_CONFIG)`."""
    given: dict[str, Any] = arguments.options or {}
    unknown = sorted(given.keys() - TrainerOptions.model_fields.keys())
    if unknown:
        raise Refused(
            Code.BAD_CONFIG,
            f"--options has unknown fields, {', '.join(unknown)}: start the trainer with the bombus that wrote them",
        )
    return settings_from(TrainerOptions, arguments, given)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"this is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"this is not a JSON object: {text}")
    return found
