"""bombus: a swarm server for agentic reinforcement learning of language models.

This package exports its client. Names are imported when they are first used, so that `import bombus` is cheap.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bombus.datums.episodes import EpisodeDatum
    from bombus.sdk.aio import AsyncSwarmClient
    from bombus.sdk.client import SwarmClient, start_engines
    from bombus.sdk.errors import EpisodesFailed, InfraError, SwarmError
    from bombus.sdk.job import Job
    from bombus.sdk.types import (
        Credentials,
        EpisodeUsage,
        JointEpisode,
        PoolInformation,
        Task,
        ThrottlePolicy,
        WorkflowOutput,
    )

__all__ = [
    "AsyncSwarmClient",
    "Credentials",
    "EpisodeDatum",
    "EpisodeUsage",
    "EpisodesFailed",
    "InfraError",
    "Job",
    "JointEpisode",
    "PoolInformation",
    "SwarmClient",
    "SwarmError",
    "Task",
    "ThrottlePolicy",
    "WorkflowOutput",
    "start_engines",
]

_HOMES = {
    "AsyncSwarmClient": "bombus.sdk.aio",
    "Credentials": "bombus.sdk.types",
    "EpisodeDatum": "bombus.datums.episodes",
    "EpisodeUsage": "bombus.sdk.types",
    "EpisodesFailed": "bombus.sdk.errors",
    "InfraError": "bombus.sdk.errors",
    "Job": "bombus.sdk.job",
    "JointEpisode": "bombus.sdk.types",
    "PoolInformation": "bombus.sdk.types",
    "SwarmClient": "bombus.sdk.client",
    "SwarmError": "bombus.sdk.errors",
    "Task": "bombus.sdk.types",
    "ThrottlePolicy": "bombus.sdk.types",
    "WorkflowOutput": "bombus.sdk.types",
    "start_engines": "bombus.sdk.client",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bombus' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
