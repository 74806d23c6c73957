import base64
import os

import pytest

from bombus.bus import BlobMissing, Blobs, Bus, snapshots
from bombus.errors import LogCorrupted

MB = 1 << 20


async def test_a_blob_is_read_back_and_replaced_as_a_whole(bus: Bus) -> None:
    first, second = os.urandom(3 * MB + 17), os.urandom(MB)
    await Blobs(bus).put("tokenizer/a b.json", first)
    assert await Blobs(bus).get("tokenizer/a b.json") == first
    await Blobs(bus).put("tokenizer/a b.json", second)
    assert await Blobs(bus).get("tokenizer/a b.json") == second
    await Blobs(bus).put("empty", b"")
    assert await Blobs(bus).get("empty") == b""
    state = await bus.state(f"OBJ_{bus.subjects.blobs_bucket}")
    assert state.bytes < 2 * MB, "the replaced object's chunks are removed"


async def test_reading_a_missing_blob_raises(bus: Bus) -> None:
    with pytest.raises(BlobMissing, match="nothing"):
        await Blobs(bus).get("nothing")


async def test_nats_own_object_store_reads_our_blobs(bus: Bus) -> None:
    data = os.urandom(MB + 1)
    await Blobs(bus).put("x", data)
    store = await bus.client.jetstream().object_store(bus.subjects.blobs_bucket)
    assert (await store.get("x")).data == data


def described(bus: Bus, name: str) -> str:
    return f"$O.{bus.subjects.blobs_bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


@pytest.mark.parametrize("body", [b"", b"[" * 5000, b'{"name":"\xff"}'])
async def test_a_description_that_cannot_be_read_is_a_damaged_log(bus: Bus, body: bytes) -> None:
    await bus.publisher.publish(described(bus, "x"), body, msg_id="x")
    with pytest.raises(LogCorrupted, match="its description cannot be read"):
        await Blobs(bus).get("x")
    await Blobs(bus).put("x", b"again")
    assert await Blobs(bus).get("x") == b"again"


async def test_a_digest_that_is_none_is_a_damaged_log(bus: Bus) -> None:
    await Blobs(bus).put("x", b"some bytes")
    stored = await bus.last(f"OBJ_{bus.subjects.blobs_bucket}", described(bus, "x"))
    assert stored is not None
    body = stored.data.replace(b"SHA-256=", b"SHA-256=!")
    await bus.publisher.publish(described(bus, "x"), body, msg_id="x2", headers={"Nats-Rollup": "sub"})
    with pytest.raises(LogCorrupted, match="its bytes differ from those that were stored"):
        await Blobs(bus).get("x")


async def test_names_that_are_not_ours_hide_no_object(bus: Bus) -> None:
    await Blobs(bus).put("snapshot-0000000000000007", b"s")
    for subject in (described(bus, "snapshot-x"), f"$O.{bus.subjects.blobs_bucket}.M._w==", described(bus, "x") + "!"):
        await bus.publisher.publish(subject, b"{}", msg_id=subject)
    assert await Blobs(bus).names("snapshot-0") == ["snapshot-0000000000000007"]
    assert await snapshots.positions(bus) == [7]
