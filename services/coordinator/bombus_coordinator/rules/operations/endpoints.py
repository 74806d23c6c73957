"""Register external inference servers that receive training clients' weights. Gateways check that the servers' hosts
are allowed."""

import re
from collections import Counter

from bombus.errors import Code, Refused
from bombus.hive import events as ev
from bombus.hive.inbox import AddEndpoint, Done, RemoveEndpoint
from bombus.hive.operations.owners import may_use
from bombus.hive.operations.state import endpoint_id
from bombus.hive.shares import has_share
from bombus.hive.state import EngineState
from bombus_coordinator.rules.claims import no_room
from bombus_coordinator.rules.decision import CommandReply, Decision, Decisions
from bombus_coordinator.rules.live import Live
from bombus_coordinator.rules.operations.sessions import TEXT_CHARS_MAX

ENDPOINTS_MAX = 64  # maximum per engine
WORLD_MAX = 4096
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}\Z")


def add(engine: EngineState, live: Live, message: AddEndpoint) -> Decisions:
    """Add an endpoint. Adding an identical endpoint changes nothing; the endpoint keeps its owner."""
    if not _HOST.match(message.host) or not 1 <= message.port <= 65_535:
        raise Refused(Code.MALFORMED, f"{message.host[:40]!r}, port {message.port}, is not the address of a server.")
    if not 1 <= message.world_size <= WORLD_MAX:
        raise Refused(Code.MALFORMED, f"world_size is {message.world_size}, but must be 1 to {WORLD_MAX}.")
    if len(message.owner) > TEXT_CHARS_MAX:
        raise Refused(Code.MALFORMED, f"The name of an API key must have at most {TEXT_CHARS_MAX} characters.")
    endpoints = engine.clients.endpoints
    name = endpoint_id(message.host, message.port)
    before = endpoints.get(name)
    if before is not None and not may_use(before.owner, message.owner):
        raise Refused(Code.UNSUPPORTED, f"{name} was registered by another client and gets only that client's weights.")
    added = ev.EndpointAdded(
        at_ns=live.now_ns,
        engine=engine.name,
        host=message.host,
        port=message.port,
        world_size=message.world_size,
        owner=message.owner if before is None else before.owner,
    )
    is_new = before is None or before.world_size != message.world_size
    if is_new and live.refusing:
        raise no_room(live)
    held = Counter(each.owner for each in endpoints.values())
    if before is None and not has_share(held, message.owner, ENDPOINTS_MAX):
        raise Refused(
            Code.QUOTA,
            f"Engine {engine.name} has {len(endpoints)} inference endpoints, {held[message.owner]} of them registered "
            f"with this key, and the limit for all keys together is {ENDPOINTS_MAX}: remove one first.",
        )
    yield Decision(events=(added,) if is_new else (), replies=(CommandReply(message.id, Done(run=engine.run)),))


def remove(engine: EngineState, live: Live, message: RemoveEndpoint) -> Decisions:
    reply = (CommandReply(message.id, Done(run=engine.run)),)
    removed = ev.EndpointRemoved(at_ns=live.now_ns, engine=engine.name, host=message.host, port=message.port)
    is_there = endpoint_id(message.host, message.port) in engine.clients.endpoints
    yield Decision(events=(removed,) if is_there else (), replies=reply)
