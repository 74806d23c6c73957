"""The job setting `save_debug_rollout_data`: the trainer writes a file of samples for each step."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from bombus.errors import BombusError, EngineFault
from bombus_trainer.backend import TrainerBackend
from bombus_trainer.data.batch import EpisodeGroup, prepare
from bombus_trainer.data.sample_files import write
from bombus_trainer.data.samples import Decode, Origin, samples_of, text_of

log = logging.getLogger(__name__)

ROLLOUT_ID = "{rollout_id}"
FAILED = "debug_rollouts_failed"


def allowed_template(wanted: str, run_folder: Path, root: Path | None) -> str:
    """Return the path template of the files: in the run's folder, or under `root`, which the operator allows.

    Raises `EngineFault` for any other path, since whoever sends a job must not choose files on this machine.
    """
    path = Path(os.path.normpath(run_folder / wanted))
    allowed = [run_folder] if root is None else [run_folder, root]
    if not any(path.resolve().is_relative_to(folder.resolve()) for folder in allowed):
        others = "; start the trainer with --debug-root to allow others" if root is None else f" or below {root}"
        raise EngineFault(
            f"trainer.save_debug_rollout_data = {wanted!r} is refused: the path must be below the run's folder{others}"
        )
    return str(path)


class DebugRollouts:
    """Writes the samples of each step of a run to `template`, in which `{rollout_id}` is replaced by the step."""

    def __init__(self, template: str, backend: TrainerBackend) -> None:
        self._template = template
        self._backend = backend
        self._decode: Decode | None = None
        try:
            self._decode = text_of(backend.files["tokenizer.json"])
        except ValueError as error:
            log.warning("debug rollout data has no texts: %s", error)

    def save(self, origin: Origin, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Write a step's file. A failed write does not fail the step: the returned metric reports it."""
        path = Path(self._template.replace(ROLLOUT_ID, str(origin.step)))
        try:
            prepared = prepare(groups, self._backend.settings, self._backend.vocab_size)
            write(path, origin.step, samples_of(origin, groups, prepared, self._decode))
        except (OSError, RuntimeError, BombusError) as error:  # torch's own writer raises RuntimeError
            log.error("step %d: the debug rollout data could not be written to %s: %s", origin.step, path, error)
            return {FAILED: 1.0}
        return {FAILED: 0.0}
