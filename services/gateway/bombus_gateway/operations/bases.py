"""Bases by the names that training clients know, which the operator gives them: `--base NAME=PATH`.

The log has paths alone: what a name leads to can be changed, and models that exist keep their base.
"""

from collections.abc import Sequence

from bombus.config.job import RunConfig
from bombus.hive.events import EngineConfigured
from bombus.hive.state import EngineState, Phase
from bombus.weights.models import ready_made


class Bases:
    """The names of one gateway."""

    def __init__(self, named: Sequence[str]) -> None:
        self._paths = dict(each.split("=", 1) for each in named)

    def path_of(self, name: str) -> str:
        """Return the base that a client means, which is the name itself where the operator gave it no other."""
        return self._paths.get(name, name)

    def name_of(self, path: str) -> str:
        """Return what clients call a base: the first of its names, or itself."""
        return next((name for name, each in self._paths.items() if each == path), path)

    def leads_to(self, path: str) -> bool:
        """Return whether the operator gave this base a name, so that its clients may have models on it."""
        return path in self._paths.values()

    def names_of(self, engine: EngineState, may_configure: bool) -> list[str]:
        """Return the names of all bases on which a client could make a model on an engine now.

        Whoever may configure an engine that is free may have any base. Where the operator has given no name to one,
        these are the models that are made on the spot.
        """
        served = base_names(engine)
        is_free = engine.phase == Phase.OFFLINE and is_replaceable(engine.configured)
        named = [name for name, path in self._paths.items() if is_free or path in served]
        names = list(dict.fromkeys([*named, *served]))
        return names or list(ready_made() if is_free and may_configure else ())

    def with_names(self, entry: dict[str, object]) -> dict[str, object]:
        """Return an entry of a list with the client's name of its `base_model`."""
        return entry | {"base_model": self.name_of(str(entry["base_model"]))}


def base_names(engine: EngineState) -> tuple[str, ...]:
    """Return the names of the base that an engine serves, or would serve: its job's first, then its own."""
    job = job_of(engine)
    return () if job is None else (job.model, engine.name)


def job_of(engine: EngineState) -> EngineConfigured | None:
    """Return the job that an engine runs, or would run."""
    return engine.configured if engine.phase == Phase.OFFLINE else engine.active or engine.configured


def plain_job(base: str) -> RunConfig:
    """Return the job of a gateway's own for models on a base."""
    return RunConfig.model_validate({"model": {"path": base}})


def is_replaceable(job: EngineConfigured | None) -> bool:
    """Return whether nothing but a base is lost with a job: there is none, or a gateway made it."""
    return job is None or (job.model != "" and RunConfig.from_json(job.config) == plain_job(job.model))
