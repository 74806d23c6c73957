"""bombus: a swarm server for agentic reinforcement learning of language models.

This package exports its client. Names are imported when they are first used, so that `import bombus` is cheap.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bombus.datums.episodes import EpisodeDatum
    from bombus.environments.budgets import RolloutBudgets
    from bombus.environments.kinds import ToolSchema, Transcript
    from bombus.environments.plain.description import WrongClass
    from bombus.environments.plain.environment import PlainEnvironment
    from bombus.environments.plain.marks import metric, reward, stop, success
    from bombus.environments.pools.aio import AsyncEnvPool
    from bombus.environments.pools.blocking import EnvPool
    from bombus.environments.pools.session import EnvSession
    from bombus.environments.rollout import Rollout
    from bombus.hive.failures import FailureKind
    from bombus.sdk.aio import AsyncSwarmClient
    from bombus.sdk.client import SwarmClient, start_engines
    from bombus.sdk.errors import EpisodesFailed, InfraError, SwarmError
    from bombus.sdk.job import Job
    from bombus.sdk.types import (
        Credentials,
        EpisodeUsage,
        MultiModelEpisode,
        PoolInformation,
        Task,
        ThrottlePolicy,
        WorkflowOutput,
    )

__all__ = [
    "AsyncEnvPool",
    "AsyncSwarmClient",
    "Credentials",
    "EnvPool",
    "EnvSession",
    "EpisodeDatum",
    "EpisodeUsage",
    "EpisodesFailed",
    "FailureKind",
    "InfraError",
    "Job",
    "MultiModelEpisode",
    "PlainEnvironment",
    "PoolInformation",
    "Rollout",
    "RolloutBudgets",
    "SwarmClient",
    "SwarmError",
    "Task",
    "ThrottlePolicy",
    "ToolSchema",
    "Transcript",
    "WorkflowOutput",
    "WrongClass",
    "metric",
    "reward",
    "start_engines",
    "stop",
    "success",
]

_HOMES = {
    "AsyncEnvPool": "bombus.environments.pools.aio",
    "EnvPool": "bombus.environments.pools.blocking",
    "EnvSession": "bombus.environments.pools.session",
    "AsyncSwarmClient": "bombus.sdk.aio",
    "Credentials": "bombus.sdk.types",
    "EpisodeDatum": "bombus.datums.episodes",
    "EpisodeUsage": "bombus.sdk.types",
    "EpisodesFailed": "bombus.sdk.errors",
    "FailureKind": "bombus.hive.failures",
    "InfraError": "bombus.sdk.errors",
    "Job": "bombus.sdk.job",
    "MultiModelEpisode": "bombus.sdk.types",
    "PlainEnvironment": "bombus.environments.plain.environment",
    "PoolInformation": "bombus.sdk.types",
    "Rollout": "bombus.environments.rollout",
    "RolloutBudgets": "bombus.environments.budgets",
    "SwarmClient": "bombus.sdk.client",
    "SwarmError": "bombus.sdk.errors",
    "Task": "bombus.sdk.types",
    "ThrottlePolicy": "bombus.sdk.types",
    "ToolSchema": "bombus.environments.kinds",
    "Transcript": "bombus.environments.kinds",
    "WorkflowOutput": "bombus.sdk.types",
    "WrongClass": "bombus.environments.plain.description",
    "metric": "bombus.environments.plain.marks",
    "reward": "bombus.environments.plain.marks",
    "start_engines": "bombus.sdk.client",
    "stop": "bombus.environments.plain.marks",
    "success": "bombus.environments.plain.marks",
}


def __getattr__(name: str) -> object:
    if name == "runs":  # a module for notebooks, which needs the extra `sql`
        return importlib.import_module("bombus.runs")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bombus' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
