"""Probe the inference servers that clients name, on hosts that the operator allows, and give them weights.

Only the hive's own replicas, as recorded on the log, are sent the key for replicas. No other server is trusted with
that key.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from bombus.endpoints.servers import (
    FoundServer,
    LoadFailed,
    ServerKind,
    find_server,
    load_adapter,
    load_folder,
)
from bombus.errors import Code, EngineFault, Refused
from bombus.machine.certificates import certificates
from bombus.machine.host_names import is_loopback
from bombus.operations import CheckpointSaved
from bombus_gateway.context import Gateway
from bombus_gateway.operations_wire.endpoints import Endpoint

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
LOOK_S = 15.0  # time for a server to identify itself, over all routes tried
LOAD_S = 1200.0  # time for a server to load weights; xorl's client waits half an hour


class Target(msgspec.Struct, frozen=True):
    """A server to give weights to. `failure` says why the server cannot be given weights. If the server is one of our
    own replicas, `key` is its access key."""

    at: Endpoint
    url: str
    server: FoundServer | None = None
    failure: str = ""
    key: str = ""

    @property
    def takes_adapters(self) -> bool:
        return self.server is not None and self.server.kind is ServerKind.REPLICA


class EndpointOutcome(msgspec.Struct, frozen=True):
    """The outcome for one server, with xorl's field names."""

    host: str
    port: int
    success: bool
    message: str


def check_allowed(hosts: Sequence[str], at: Endpoint) -> None:
    """Raise `Refused` unless the operator lets gateways talk to servers at this address."""
    if {at.host, f"{at.host}:{at.port}"} & {host.lower() for host in hosts}:
        return
    why = (
        f"Inference endpoints may only be on {', '.join(hosts)} here, not at {at.host}:{at.port}."
        if hosts
        else f"This hive does not talk to external inference endpoints such as {at.host}:{at.port}."
    )
    raise Refused(
        Code.UNSUPPORTED,
        f"{why} Its operator allows hosts with --inference-host (gateway.inference_hosts of a cluster file).",
    )


def replica_at(gateway: Gateway, url: str) -> Target:
    """Return the target for one of the hive's replicas."""
    where = urlsplit(url)
    at = Endpoint(where.hostname or "", where.port or 80)
    return Target(at, url, FoundServer(kind=ServerKind.REPLICA), key=gateway.keys.for_replicas)


def _leads_to(url: str, at: Endpoint) -> bool:
    """Return whether a replica's URL leads to an address. All names of the loopback interface count as one host."""
    where = urlsplit(url)
    host = where.hostname or ""
    is_there = host == at.host or (is_loopback(host) and is_loopback(at.host))
    return is_there and (where.port or 80) == at.port


async def looked_at(gateway: Gateway, at: Endpoint) -> Target:
    """Return the server at an address as a target. The target has a `failure` if, for example, the operator does not
    allow the server's host."""
    import httpx  # imported late: httpx takes 5 MB, and few gateways need it

    url = f"http://[{at.host}]:{at.port}" if ":" in at.host else f"http://{at.host}:{at.port}"
    try:
        check_allowed(gateway.settings.inference_hosts, at)
        engines = gateway.follower.hive.engines.values()
        for own in [replica.url for engine in engines for replica in engine.replicas.values()]:
            if _leads_to(own, at):
                return replica_at(gateway, own)
        async with asyncio.timeout(LOOK_S), _client(url) as client:
            found = await find_server(client)
    except Refused as refusal:
        return Target(at, url, failure=refusal.why)
    except EngineFault as fault:
        return Target(at, url, failure=str(fault))
    except httpx.InvalidURL as error:
        return Target(at, url, failure=f"{url} is not an address: {error}")
    except TimeoutError:
        return Target(at, url, failure=f"no server can be used at {url}: it did not identify itself in {LOOK_S:.0f} s")
    if not found.can_load:
        why = f"{url} has no way to load new weights: start vLLM with VLLM_SERVER_DEV_MODE=1"
        return Target(at, url, found, failure=why)
    return Target(at, url, found)


async def given(target: Target, saved: CheckpointSaved, label: str) -> EndpointOutcome:
    """Have a server load a checkpoint from its folder, which must have the same path on the server."""
    import httpx

    try:
        if target.server is None or target.failure:
            raise LoadFailed(target.failure)
        folder = Path(saved.folder)
        async with asyncio.timeout(LOAD_S), _client(target.url, target.key) as client:
            if target.takes_adapters:
                await load_adapter(client, folder, saved.address, LOAD_S)
                how = f"It has the adapter {saved.address[:12]} in addition to its own policy."
            else:
                await load_folder(client, target.server.kind, folder, label, LOAD_S)
                how = f"It has loaded the files in {saved.folder}, as {label}."
    except LoadFailed as failed:
        return _failed(target, str(failed))
    except httpx.HTTPError as error:
        return _failed(target, f"the request to {target.url} failed: {str(error) or type(error).__name__}")
    except TimeoutError:
        return _failed(target, f"{target.url} did not load the weights within {LOAD_S:.0f} s")
    return EndpointOutcome(target.at.host, target.at.port, True, how)


def _failed(target: Target, why: str) -> EndpointOutcome:
    return EndpointOutcome(target.at.host, target.at.port, False, why)


def _client(url: str, key: str = "") -> "httpx.AsyncClient":
    """Return a client that talks to only one server: it follows no redirects and ignores proxies in the environment."""
    import httpx

    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(LOAD_S, connect=CONNECT_S),
        trust_env=False,
        verify=certificates(False),
        follow_redirects=False,
    )
