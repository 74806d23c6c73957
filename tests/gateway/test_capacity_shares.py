"""Which calls and samples a gateway that is full still takes."""

import itertools
from contextlib import ExitStack

import pytest

from bombus.bus import Bus
from bombus.errors import Code, Refused
from bombus.hive.state import Hive
from bombus.machine.hive_keys import HiveKeys, KeyRing, NamedKey
from bombus_gateway.access import Access, Guard
from bombus_gateway.call.capacity import CallCapacity
from bombus_gateway.call.replica_client import ReplicaGone
from bombus_gateway.settings import GatewaySettings

KEYS = {"admin": "an-admin-key-for-tests", "client": "a-client-key-for-tests", "alice": "alices-key-for-tests"}


def test_the_admin_is_known_by_its_key_also_where_clients_need_none() -> None:
    for client in ("", KEYS["client"]):
        named = {"alice": NamedKey(key=KEYS["alice"])} if client else {}
        guard = Guard(Access.CLIENT, KeyRing(HiveKeys(admin=KEYS["admin"], client=client, clients=named)), "")
        shares = [guard.holder([(b"x-api-key", key.encode())]).share for key in KEYS.values()]
        assert shares == ["/admin", "", "alice" if client else ""]


async def test_thousands_of_samples_leave_room_for_calls_of_episodes_and_for_samples_of_others(bus: Bus) -> None:
    capacity = CallCapacity(bus, GatewaySettings(open_calls_max=8), Hive)
    with ExitStack() as opened:

        def count(kind: str, holder: str) -> int:
            """Open as many as are taken, and return how many."""
            for taken in itertools.count():
                try:
                    if kind == "sample":
                        opened.enter_context(capacity.open_sample(holder))
                    else:
                        capacity.reserve(1, holder)
                        opened.callback(capacity.release, 1, holder)
                except Refused:
                    return taken
            raise AssertionError("unreachable")

        assert count("sample", "") == 8
        assert count("call", "") == 4, "calls of the same key's episodes, too"
        assert count("call", "alice") == 2
        assert count("sample", "/admin") == 2
        with pytest.raises(Refused, match="has 16 calls open, and its limit is 8") as refused, capacity.open_sample(""):
            pass
        assert refused.value.code == Code.OVERLOADED
    assert capacity.open_calls == capacity.reserved == 0


async def test_samples_that_were_not_stored_take_no_room_in_the_log(bus: Bus) -> None:
    size, whole = 1 << 20, (await bus.state(bus.subjects.calls_stream)).max_bytes
    capacity = CallCapacity(bus, GatewaySettings(log_fill_max=2.5 * size / whole), Hive)
    await capacity.refresh()
    for _ in range(10):
        with pytest.raises(ReplicaGone), capacity.room(size, ""):
            raise ReplicaGone("it is gone")
    for _ in range(2):
        with capacity.room(size, ""):
            assert capacity.reserved == size
    with pytest.raises(Refused, match="The log of calls is 3% full") as refused, capacity.room(size, ""):
        pass
    assert refused.value.code == Code.OVERLOADED
    assert capacity.reserved == 0
    await capacity.refresh()
    with capacity.room(2 * size, ""):
        pass
