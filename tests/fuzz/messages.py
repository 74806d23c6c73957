"""Messages that somebody with access to the bus may send: to the inbox, and to the subjects on which trainers answer.

Facts that are well formed are believed, so those of the engine that trains are damaged; another engine, which nobody
serves, gets them all.
"""

import random
from contextlib import suppress

import msgspec

from bombus.bus import REPLY, TRACEPARENT, Bus
from bombus.bus.blobs import Blobs
from bombus.errors import LogCorrupted, Refused
from bombus.hive import inbox
from bombus.hive.events import HIVE
from tests.fuzz.examples import examples
from tests.fuzz.values import ODD, Tree, damaged, mutated, to_msgpack

OTHER = "other"
OF_CLIENTS = inbox.Claim | inbox.End | inbox.MultiModelEnd | inbox.Abort | inbox.AgreeSync | inbox.Lookup | inbox.Touch
_OF_THE_LEADER = {"storage.seen", "operations.stored"}  # which it sends to itself, about the bus
TREES: list[Tree] = [each for each in examples(inbox.AnyMessage) if each["kind"] not in _OF_THE_LEADER]
# Not subjects, and those of others.
REPLIES = ("x", "a b", "*", "_INBOX.>", "", ".", "\u00e9", "x" * 2000, "$JS.API.STREAM.LIST", "bombus.main.inbox.stop")
ENGINES = (OTHER, "a b", "*", ">", "a.b", "", "x" * 300, "\r\nPUB x 1", "\u00e9", "\0")


def message(seed: int, number: int) -> tuple[str, bytes]:
    """Return the kind that a message's subject names, and its bytes. Pure."""
    pick = random.Random(f"bus/{seed}/{number}")
    tree = pick.choice(TREES)
    body = to_msgpack(mutated({**tree, "id": f"fuzz-{number}", "engine": pick.choice((OTHER, *ENGINES))}, pick, TREES))
    if pick.random() < 0.2:
        body = damaged(body, pick)
    return tree["kind"], b"\xc1" if _is_believed(body) else body


def _is_believed(body: bytes) -> bool:
    """Whether this is a fact about the engine that trains, or about the whole hive."""
    try:
        found = inbox.decode_message(body)
    except msgspec.MsgspecError:
        return False
    return not isinstance(found, OF_CLIENTS) and (
        found.engine in ("main", HIVE) or isinstance(found, inbox.StorageSeen)
    )


async def send(bus: Bus, seed: int, number: int, trainer_epoch: int) -> None:
    """Send a message, and now and then something else that is stored or answered."""
    pick = random.Random(f"bus/{seed}/{number}/how")
    kind, body = message(seed, number)
    odd = pick.choice([each for each in ODD if isinstance(each, str) and each.isprintable()][:20])
    headers = {REPLY: pick.choice(REPLIES).replace("\n", ""), TRACEPARENT: odd} if pick.random() < 0.5 else {}
    match pick.randrange(12):
        case 0:
            subjects = bus.subjects
            subject = pick.choice((subjects.full_copies, subjects.trainer))("main", trainer_epoch)
            await bus.client.publish(subject, body[: 1 << 18], reply=pick.choice(("", "x", "_INBOX.none")))
        case 1:
            await _object(bus, f"fuzz-{number % 8}", body)
        case _:
            with suppress(Refused):  # larger than the server takes
                await bus.publisher.publish(
                    bus.subjects.inbox(kind), body, msg_id=f"fuzz-{seed}-{number}", headers=headers or None
                )


async def _object(bus: Bus, name: str, description: bytes) -> None:
    """Store an object, spoil its description, and read it."""
    blobs = Blobs(bus)
    await blobs.put(name, b"content")
    await bus.publisher.publish(blobs._meta_subject(name), description[: 1 << 18], msg_id=f"{name}-spoiled")
    with suppress(LogCorrupted):
        await blobs.get(name)
    await blobs.names("fuzz-")
