"""A cluster of three real nats-servers on loopback, for tests that kill the leader of a stream."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from bombus.bus import Bus, EmbeddedServer
from bombus.bus.requests import ApiCall
from bombus.bus.server import HOST
from bombus.bus.wire import ApiError
from tests.conftest import kill

NODES = 3
START_S = 30.0
_LOOK_S = 0.05


class Peer(msgspec.Struct, frozen=True):
    name: str
    current: bool = False
    offline: bool = False
    lag: int = 0


class Raft(msgspec.Struct, frozen=True):
    """The leader of a stream, and its followers."""

    leader: str = ""
    replicas: tuple[Peer, ...] = ()

    @property
    def in_sync(self) -> bool:
        followers = len(self.replicas) == NODES - 1
        return bool(self.leader) and followers and all(peer.current and not peer.lag for peer in self.replicas)


class _Info(msgspec.Struct, frozen=True):
    cluster: Raft = Raft()
    error: ApiError | None = None


_decode = msgspec.json.Decoder(_Info).decode


class Node(EmbeddedServer):
    """One server of a cluster. `routes` are the cluster ports of all servers, its own first."""

    def __init__(self, data_dir: Path, port: int, monitor_port: int, routes: Sequence[int]) -> None:
        super().__init__(data_dir, port, store_bytes_max=16 << 30)
        self._monitor_port = monitor_port
        self._routes = routes
        self._health = f"http://{HOST}:{monitor_port}/healthz"

    @property
    def name(self) -> str:
        return self._name

    def healthy(self) -> bool:
        """Return whether the server reports that it has caught up with the cluster."""
        try:
            return httpx.get(self._health, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _config(self) -> str:
        cluster = {
            "name": "bombus",
            "listen": f"{HOST}:{self._routes[0]}",
            "routes": [f"nats://{HOST}:{port}" for port in self._routes[1:]],
        }
        monitor = f"{HOST}:{self._monitor_port}"
        return f"{super()._config()}http: {json.dumps(monitor)}\ncluster: {json.dumps(cluster)}\n"


class Cluster:
    def __init__(self, folder: Path) -> None:
        ports = free_ports(3 * NODES)
        routes = ports[2 * NODES :]
        self.nodes = [
            Node(folder / f"node-{index}", ports[index], ports[NODES + index], routes[index:] + routes[:index])
            for index in range(NODES)
        ]

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    async def start(self) -> None:
        """Start all servers at once: one alone is not a majority and does not become ready."""
        await asyncio.gather(*(asyncio.to_thread(node.start, START_S) for node in self.nodes))

    def stop(self) -> None:
        for node in self.nodes:
            kill(node)

    async def leader(self, bus: Bus, stream: str) -> Node:
        """Wait until a server leads the stream and return it."""
        while True:
            raft = await self._raft(bus, stream)
            if raft.leader:
                return next(node for node in self.nodes if node.name == raft.leader)
            await asyncio.sleep(_LOOK_S)

    async def in_sync(self, bus: Bus, streams: Sequence[str]) -> None:
        """Wait until every server is healthy and has all messages of every stream."""
        for node in self.nodes:
            while not await asyncio.to_thread(node.healthy):
                await asyncio.sleep(_LOOK_S)
        for stream in streams:
            while not (await self._raft(bus, stream)).in_sync:
                await asyncio.sleep(_LOOK_S)

    async def _raft(self, bus: Bus, stream: str) -> Raft:
        return (await bus.requests.api(ApiCall(f"stream {stream}", f"STREAM.INFO.{stream}", _decode))).cluster


@asynccontextmanager
async def nats_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Run a cluster for the length of the block."""
    cluster = Cluster(folder)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.stop()


def free_ports(count: int) -> list[int]:
    """Return free ports, chosen together so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
