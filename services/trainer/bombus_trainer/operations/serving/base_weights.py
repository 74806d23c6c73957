"""Publishes the base of an operations run as version 0, so that replicas can load it and sample."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from bombus.bus import Blobs, Bus
from bombus.config.job import RunConfig
from bombus.errors import EngineFault
from bombus.faults import Point, reached
from bombus.hive.inbox import WeightsSaved
from bombus_trainer.backends.torch.model import PolicyModel
from bombus_trainer.loading import base_files, pack_tokenizer
from bombus_trainer.options import TrainerOptions
from bombus_trainer.ownership import RunOwnership
from bombus_trainer.publish.directories import remove_earlier
from bombus_trainer.publish.export import ModelPart, Outline, Tensors
from bombus_trainer.recovery.progress import Kind, in_thread
from bombus_trainer.versions import Versions

log = logging.getLogger(__name__)

T = TypeVar("T")


class BaseSource:
    """The base as a source of weights: the model under all adapters, and its other files."""

    def __init__(self, policy: PolicyModel, files: Mapping[str, bytes]) -> None:
        self._policy = policy
        self.files = files

    def outline(self, part: ModelPart = ModelPart.MODEL) -> Outline:
        return Outline(self._policy.export_dtype, self._policy.dense_shapes())

    def read_weights(self, use: Callable[[Tensors], T], part: ModelPart = ModelPart.MODEL) -> T:
        """Pass all weights of the base to `use`, whichever `part` is requested."""
        return use(self._policy.dense_weights())


async def publish_base(bus: Bus, options: TrainerOptions, ownership: RunOwnership, policy: PolicyModel) -> None:
    """Publish version 0, unless it is already on the log.

    If no replica could load it, because it has no tokenizer or is too large for the object store, the run trains
    without replicas.
    """
    if ownership.engine.version >= 0:
        return
    job = ownership.job
    bases = options.folder / "bases" / bus.subjects.hive / options.engine
    remove_earlier(bases, ownership.run, ownership.epoch)
    versions = Versions(bus, options, bases / f"run-{ownership.run}", ownership.run, ownership.epoch)
    try:
        source = await in_thread(Kind.LOAD, "reading the tokenizer", partial(_source, job, options, policy))
        await versions.check(source)
    except EngineFault as fault:
        log.warning("run %d trains, but no replica can sample from its base: %s", ownership.run, fault)
        return
    name, blob = pack_tokenizer(source.files)
    await Blobs(bus).put(name, blob)
    reached(Point.TRAINER_TOKENIZER_STORED)
    saved = WeightsSaved(**ownership.head("weights-0"), step=0, weights=await versions.publish_fixed(source, name))
    await ownership.say(saved, lambda engine: engine.version >= 0, Point.TRAINER_WEIGHTS_SAID)
    reached(Point.TRAINER_WEIGHTS_SEEN)
    await versions.prune((ownership.engine.weights,))
    reached(Point.TRAINER_WEIGHTS_PRUNED)


def _source(job: RunConfig, options: TrainerOptions, policy: PolicyModel) -> BaseSource:
    return BaseSource(policy, base_files(job, options))
