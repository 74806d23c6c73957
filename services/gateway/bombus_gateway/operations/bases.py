"""The names that the operator defines for training clients' bases: `--base NAME=PATH`.

The log contains only paths, so a name can be given to another path while existing models keep their base.
"""

from collections.abc import Sequence

from bombus.config.job import RunConfig
from bombus.hive.events import EngineConfigured
from bombus.hive.state import EngineState, Phase
from bombus.weights.models import ready_made


class Bases:
    """One gateway's names for bases."""

    def __init__(self, named: Sequence[str]) -> None:
        self._paths = dict(each.split("=", 1) for each in named)

    def path_of(self, name: str) -> str:
        """Return the path of the base that a client names, or the name itself if the operator has not defined it."""
        return self._paths.get(name, name)

    def name_of(self, path: str) -> str:
        """Return the name that clients use for a base: the first name defined for its path, or the path itself."""
        return next((name for name, each in self._paths.items() if each == path), path)

    def leads_to(self, path: str) -> bool:
        """Return whether the operator has named the base at this path, so that any client may create models on it."""
        return path in self._paths.values()

    def names_of(self, engine: EngineState, may_configure: bool) -> list[str]:
        """Return the names of all bases on which a client could currently create a model on an engine.

        A client that may configure a free engine may use any base. For such a client, if the operator has named no
        base, return the models that need neither a folder nor a hub (`ready_made`).
        """
        served = base_names(engine)
        is_free = engine.phase == Phase.OFFLINE and is_replaceable(engine.configured)
        named = [name for name, path in self._paths.items() if is_free or path in served]
        names = list(dict.fromkeys([*named, *served]))
        return names or list(ready_made() if is_free and may_configure else ())

    def with_names(self, entry: dict[str, object]) -> dict[str, object]:
        """Return a list entry with `base_model` replaced by the name that clients use."""
        return entry | {"base_model": self.name_of(str(entry["base_model"]))}


def base_names(engine: EngineState) -> tuple[str, ...]:
    """Return the names for the base that an engine serves, or would serve if started: first its job's model, then the
    engine's own name."""
    configured = _configured(engine)
    return () if configured is None else (configured.model, engine.name)


def job_of(engine: EngineState) -> RunConfig | None:
    """Return the job that an engine runs, or would run if started."""
    configured = _configured(engine)
    return None if configured is None else RunConfig.from_json(configured.config)


def _configured(engine: EngineState) -> EngineConfigured | None:
    return engine.configured if engine.phase == Phase.OFFLINE else engine.active or engine.configured


def plain_job(base: str) -> RunConfig:
    """Return the job that a gateway itself configures for models on a base."""
    return RunConfig.model_validate({"model": {"path": base}})


def is_replaceable(job: EngineConfigured | None) -> bool:
    """Return whether a job can be replaced without losing any setting except its base, because it is None or was made
    by a gateway."""
    return job is None or (job.model != "" and RunConfig.from_json(job.config) == plain_job(job.model))
