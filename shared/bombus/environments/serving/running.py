"""Assembles an environment server from its parts: class, backends, slots, pages, and the announcement on the bus."""

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from bombus.environments.backends.folders import remove_left_folders
from bombus.environments.backends.kinds import REAL, Backend, RealBackend
from bombus.environments.backends.pool import BackendPool
from bombus.environments.backends.process import ministack
from bombus.environments.backends.shell import ShellSandbox
from bombus.environments.loading import load_class
from bombus.environments.serving.pages import playground
from bombus.environments.serving.server import EnvironmentServer, environment_server
from bombus.environments.serving.settings import ServingSettings
from bombus.environments.serving.sources import ClassSource
from bombus.environments.variables import number_of
from bombus.errors import Code, Refused
from bombus.machine.host_names import OwnHostNames

log = logging.getLogger(__name__)

BASE_PORT_VARIABLE = "AWS_RL_ENV_MINISTACK_BASE_PORT"
SLOTS_VARIABLE = "AWS_RL_ENV_POOL_SIZE"
KIND_VARIABLE = "BACKEND_TYPE"
PORT_MAX = 65_535


class BackendKind(StrEnum):
    """What a server's environments run on."""

    NONE = "none"  # only the server's own process
    MINISTACK = "ministack"  # an AWS simulator for each
    SHELL = "shell"  # each environment has a sandbox for commands


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """An environment server as configured by its operator."""

    path: str  # in the form module:Class
    settings: ServingSettings
    backend: BackendKind = BackendKind.NONE
    spares: int = 0
    host_names: tuple[str, ...] = ()


def backends_of(deployment: Deployment, environment: Mapping[str, str]) -> BackendPool | RealBackend | None:
    """Return the pool of backends, or None if environments need no backends. Raises `Refused` for invalid environment
    variables.

    With `BACKEND_TYPE=aws`, the result is `REAL` instead of a pool, and the class uses the real AWS.
    """
    kind, slots, spares = deployment.backend, deployment.settings.slots, deployment.spares
    wanted = environment.get(KIND_VARIABLE, "").strip() or "simulator"
    if wanted not in ("simulator", "aws"):
        raise Refused(Code.BAD_CONFIG, f"{KIND_VARIABLE} is {wanted[:40]!r}: it must be simulator or aws")
    if kind == BackendKind.MINISTACK and wanted == "aws":
        if slots > 1:
            why = (
                f"{KIND_VARIABLE}=aws gives all environments the same account, where they would interfere with each "
                "other"
            )
            raise Refused(Code.BAD_CONFIG, f"{why}: serve it with --slots 1")
        return REAL
    match kind:
        case BackendKind.MINISTACK:
            base = number_of(environment, BASE_PORT_VARIABLE, 0, 1, PORT_MAX - slots - spares + 1)
            return BackendPool(partial(ministack, base_port=base), slots, spares, "MiniStack")
        case BackendKind.SHELL:
            return BackendPool(_sandbox, slots, spares, "Shell")
        case BackendKind.NONE:
            return None


def _sandbox(number: int) -> Backend:
    return ShellSandbox()


@contextlib.asynccontextmanager
async def deployed(
    deployment: Deployment, bound: socket.socket, environment: Mapping[str, str]
) -> AsyncIterator[EnvironmentServer]:
    """Serve a class while the block runs. Raises `Refused` if the class cannot be served, or `InfraError`."""
    make = load_class(deployment.path)
    check_backend(make, deployment)
    names = OwnHostNames(str(bound.getsockname()[0]), deployment.host_names)
    async with contextlib.AsyncExitStack() as stack:
        backends = backends_of(deployment, environment)
        if isinstance(backends, BackendPool):
            if left := await remove_left_folders():
                log.info("removed %d backend folders left by killed servers", left)
            await stack.enter_async_context(backends)
        source = ClassSource(make, backends)
        pages = playground(deployment.path) if deployment.settings.slots == 1 else {}
        server = EnvironmentServer(deployment.settings, source, names, pages)
        yield await stack.enter_async_context(environment_server(server, bound))


def check_backend(make: Callable[..., Any], deployment: Deployment) -> None:
    """Raise `Refused` if backends would be started for a class that does not take any."""
    takes = "backend" in inspect.signature(make).parameters
    if deployment.backend != BackendKind.NONE and not takes:
        why = f"{deployment.path} takes no backend: give its __init__ a parameter `backend`, or leave out --backend"
        raise Refused(Code.BAD_CONFIG, why)


async def serve_until_cancelled(
    deployment: Deployment,
    bound: socket.socket,
    environment: Mapping[str, str],
    ready: Callable[[EnvironmentServer], None],
    beside: Sequence[Callable[[EnvironmentServer], Any]] = (),
) -> None:
    """Serve the class, call `ready` once clients can connect, and run the functions in `beside` at the same time."""
    async with deployed(deployment, bound, environment) as server, asyncio.TaskGroup() as tasks:
        for each in beside:
            tasks.create_task(each(server))
        ready(server)
        await asyncio.Event().wait()
