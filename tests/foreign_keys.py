"""Keys that open nothing of a hive but what they are for: nothing, wrong ones, expired ones, and a neighbour's."""

import time

from bombus.bus import Bus
from bombus.hive.subjects import SIGNING_SECRET
from bombus_gateway.keys import Keys

LATER_NS, LONG_AGO_NS = 2**62, 1
NEIGHBOUR = b"the secret of another hive, 32 B"


async def foreign_keys(bus: Bus, right: str) -> dict[str, str]:
    """Return such keys by what they are, each of which a port that opens with the key `right` has to refuse."""
    keys, neighbour = Keys(await bus.secret(SIGNING_SECRET)), Keys(NEIGHBOUR)
    found = {
        "no key": "",
        "a wrong key": "a-key-that-nobody-has-made",
        "all but the end of the key": right[:-1],
        "the key and more": f"{right}x",
        "an agent's key": keys.sign("main", 1, "main-1-1", LATER_NS),
        "an agent's expired key": keys.sign("main", 1, "main-1-1", LONG_AGO_NS),
        "the id of a claim": keys.claimed_id("main-1-1"),
        "a neighbour's agent's key": neighbour.sign("main", 1, "main-1-1", time.time_ns() + 10**12),
        "the key of a neighbour's replicas": neighbour.for_replicas,
        "the key of this hive's replicas": keys.for_replicas,
    }
    return {what: key for what, key in found.items() if key != right}
