"""Checks the NATS servers and streams of a hive: message sizes, disk space, limits and replicas."""

import asyncio
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import msgspec

from bombus.cli import URL_FILE
from bombus.config.cluster import Cluster
from bombus.config.streams import (
    LIMIT_FLAGS,
    PAYLOAD_BYTES,
    POWER_NAME,
    StreamLimits,
    bytes_reserved,
    disk_needed,
    limit_flag,
)
from bombus.errors import BombusError, Code, Refused
from bombus.figures import byte_size
from bombus.hive.state import Hive
from bombus.hive.status.data import engine_status
from bombus.hive.status.text import canary_text
from bombus.host.doctor import Finding, State, check

if TYPE_CHECKING:
    from bombus.bus import StreamState

CONNECT_S = 3.0
NATS_PORT = 4222
INFO_BYTES_MAX = 64 << 10
NEARLY_FULL = 0.9
LESS_DISK = f"lower the streams' sizes ({LIMIT_FLAGS}), or give another --data-dir"


class ServerInfo(msgspec.Struct, frozen=True):
    """The information that a NATS server sends to every client that connects."""

    server_name: str = ""
    max_payload: int = 0
    jetstream: bool = False


def examine_streams(cluster: Cluster) -> Iterator[Finding]:
    """Check the NATS servers that the hive uses or that run here, and the hive's replicas and streams. If the hive has
    no streams yet, check the planned ones."""
    url_file = Path(cluster.data_dir) / URL_FILE.name
    urls = cluster.nats or (url_file.read_text().strip() if url_file.is_file() else "")
    if not urls:
        yield from _planned(cluster)
        return
    servers = [_server(url.strip()) for url in urls.split(",")]
    yield from (finding for finding, _ in servers)
    if all(finding.state == State.MISSING for finding, _ in servers):
        return
    yield _durability(any(name.startswith(POWER_NAME) for _, name in servers), theirs=bool(cluster.nats))
    try:
        from bombus.bus import Bus
        from bombus.bus.follow import fold
    except ModuleNotFoundError:
        yield check("streams", False, "not checked: nats-py is not installed", "pip install 'bombus[bus]'", False)
        return

    async def states() -> "tuple[dict[str, StreamState], Hive | None]":
        async with await Bus.connect(urls, cluster.hive, name="doctor", timeout_s=CONNECT_S) as bus:
            streams = await bus.limited_states()
            try:
                return streams, await fold(bus)
            except TimeoutError:
                return streams, None

    try:
        found, hive = asyncio.run(states())
    except BombusError as error:
        detail = f"hive {cluster.hive} has none yet: {error}"
        yield check("streams", False, detail, "`bombus up` or `bombus coordinator` creates them", False)
        return
    for name, state in found.items():
        yield _stream(name, state, cluster.streams)
    yield from _replicas(hive)


def _replicas(hive: Hive | None) -> Iterator[Finding]:
    """Yield how far each replica's logprobs of the canary are from the trainer's, and which replicas are
    quarantined."""
    if hive is None:
        yield check("replicas", False, "not checked: the log could not be read in time", "try again", needed=False)
        return
    for engine in hive.engines.values():
        for replica in engine_status(engine, 0).replicas:
            what, canary = f"engine {engine.name}: {replica.replica}", canary_text(replica)
            if replica.quarantined:
                yield check(what, False, f"quarantined: {replica.quarantined}", "see `bombus why`", needed=False)
            elif canary:
                yield check(what, True, f"canary of version {replica.version}: {canary}")


def _durability(power: bool, theirs: bool) -> Finding:
    if power:
        detail = "power: what was acknowledged survives the end of any process and a power cut"
    elif theirs:
        detail = "depends on these servers: their sync_interval and the replicas of the streams"
    else:
        kept = "what was acknowledged survives the end of any process"
        detail = f"process: {kept}, but a power cut may take the last second of it (see --durability power)"
    return Finding("durability", State.OK, detail)


def _server(url: str) -> tuple[Finding, str]:
    """Return what was found at an address, and the name of the server there."""
    parsed = urlparse(url if "//" in url else f"nats://{url}")
    address = f"{parsed.hostname}:{parsed.port or NATS_PORT}"
    try:
        info = _server_info(parsed.hostname or "", parsed.port or NATS_PORT)
    except (OSError, ValueError) as error:
        return check("nats", False, f"{address} does not answer: {error}", "start it, or correct its URL"), ""
    if not info.jetstream:
        return check("nats", False, f"{address} answers without JetStream", "switch it on: `jetstream {}` or -js"), ""
    todo = f"set max_payload: {PAYLOAD_BYTES} in its configuration; until then larger calls and batches are refused"
    detail = f"{address} answers and takes messages of up to {byte_size(info.max_payload)}"
    return check("nats", info.max_payload >= PAYLOAD_BYTES, detail, todo, needed=False), info.server_name


def _server_info(host: str, port: int) -> ServerInfo:
    """Return the first line that a server sends. Raises `OSError`, or `ValueError` if it is not a NATS server."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection, connection.makefile("rb") as lines:
        line = lines.readline(INFO_BYTES_MAX)
    if not line.startswith(b"INFO "):
        raise ValueError("it is not a NATS server")
    return msgspec.json.decode(line.removeprefix(b"INFO "), type=ServerInfo)


def _stream(name: str, state: "StreamState", wanted: StreamLimits) -> Finding:
    from bombus.bus.streams import stream_text

    limit = getattr(wanted, f"{name}_bytes_max")
    becomes = [byte_size(limit)] if limit not in (None, state.max_bytes) else []
    becomes += [f"{wanted.replicas} replicas"] if wanted.replicas not in (None, state.replicas) else []
    detail = stream_text(state) + (f"; {' and '.join(becomes)} after a restart" if becomes else "")
    if limit is not None and limit < state.bytes:
        return check(f"stream {name}", False, detail, f"{limit_flag(name)} must be at least the size of the stream")
    if state.fill > NEARLY_FULL:
        return check(f"stream {name}", False, f"nearly full: {detail}", f"raise {limit_flag(name)}", needed=False)
    todo = "start the missing server again, or one with the same server_name and an empty folder"
    return check(f"stream {name}", not state.late, detail, todo, needed=False)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds a folder. The folder may not exist yet."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(place).free


def check_room(cluster: Cluster) -> None:
    """Raise `Refused(BAD_CONFIG)` unless our own server's disk has room for a new hive's streams."""
    folder = Path(cluster.data_dir).absolute()
    if cluster.nats or (folder / "nats" / "jetstream").exists():
        return
    free, needed = free_bytes(folder), disk_needed(cluster.streams)
    if free < needed:
        why = f"{folder} is on a disk with {byte_size(free)} free, but this hive needs {byte_size(needed)} there"
        raise Refused(Code.BAD_CONFIG, f"{why}: {LESS_DISK}")


def _planned(cluster: Cluster) -> Iterator[Finding]:
    """Check that the disk has room for new streams, and say what they will survive."""
    yield _durability(cluster.durability == "power", theirs=False)
    folder = Path(cluster.data_dir).absolute()
    if (folder / "nats" / "jetstream").exists():
        yield Finding("streams", State.OK, f"those in {folder} are kept; `bombus status` shows them in a running hive")
        return
    free, needed = free_bytes(folder), disk_needed(cluster.streams)
    reserved = byte_size(bytes_reserved(cluster.streams))
    detail = f"1 replica; reserves {reserved} of {byte_size(free)} free; {byte_size(needed)} must be free"
    yield check("streams", needed <= free, detail, LESS_DISK)
