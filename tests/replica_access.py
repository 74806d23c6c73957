"""What a test that asks a replica itself sends, as the hive's gateways do."""

from bombus.bus import Bus
from bombus.hive.generation import replica_key
from bombus.hive.subjects import SIGNING_SECRET


async def replica_headers(bus: Bus) -> dict[str, str]:
    return {"authorization": f"Bearer {replica_key(await bus.secret(SIGNING_SECRET))}"}
