import os

import pytest

from bombus.bus import BlobMissing, Blobs, Bus

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
