import asyncio
import os

import msgspec
import pytest

from bombus.bus import Bus
from bombus.bus.large.parts import PART_BYTES_MAX, Parts
from bombus.errors import BusUnavailable, Code, LogCorrupted, Refused
from bombus.hive.records import BODY_BYTES_MAX, BodyRef, digest


def subject(bus: Bus, model: str = "s:train:0") -> str:
    return bus.subjects.operation("main", model)


async def test_a_body_travels_in_parts_of_a_megabyte_and_is_read_back_whole(bus: Bus) -> None:
    body = os.urandom(2 * PART_BYTES_MAX + 7)
    ref = await Parts(bus).store(subject(bus), body)
    assert (ref.seqs, ref.size, ref.digest) == ((1, 2, 3), 2_000_007, digest(body))
    assert ref.first == 1
    assert await Parts(bus).fetch(ref) == body
    sizes = [len(stored.data) for stored in await bus.get_many(bus.subjects.ops_stream, ref.seqs)]
    assert sizes == [1_000_000, 1_000_000, 7]


async def test_an_empty_body_has_one_part(bus: Bus) -> None:
    ref = await Parts(bus).store(subject(bus), b"")
    assert (ref.seqs, ref.size) == ((1,), 0)
    assert await Parts(bus).fetch(ref) == b""


async def test_several_writers_at_once_read_back_what_each_has_stored(bus: Bus) -> None:
    bodies = [os.urandom(3 * PART_BYTES_MAX) for _ in range(4)]
    refs = await asyncio.gather(*(Parts(bus).store(subject(bus, f"m{n}"), body) for n, body in enumerate(bodies)))
    assert sorted(seq for ref in refs for seq in ref.seqs) == list(range(1, 13))
    assert [await Parts(bus).fetch(ref) for ref in refs] == bodies


async def test_a_reference_finds_its_own_parts_among_those_of_another_writer(bus: Bus) -> None:
    for part in (b"mi", b"you", b"ne", b"rs"):
        await bus.publisher.publish(subject(bus), part, msg_id=part.decode())
    assert await Parts(bus).fetch(BodyRef(seqs=(1, 3), size=4, digest=digest(b"mine"))) == b"mine"
    assert await Parts(bus).fetch(BodyRef(seqs=(2, 4), size=5, digest=digest(b"yours"))) == b"yours"


async def test_the_same_body_stored_twice_has_two_copies_since_the_first_may_be_purged(bus: Bus) -> None:
    first = await Parts(bus).store(subject(bus), b"the same")
    await bus.purge_below(bus.subjects.ops_stream, 2)
    second = await Parts(bus).store(subject(bus), b"the same")
    assert second.seqs == (2,)
    assert await Parts(bus).fetch(second) == b"the same"
    with pytest.raises(LogCorrupted, match="no message at 1"):
        await Parts(bus).fetch(first)


async def test_parts_that_are_not_those_that_were_stored_are_refused(bus: Bus) -> None:
    ref = await Parts(bus).store(subject(bus), b"mine")
    other = await Parts(bus).store(subject(bus), b"yours")
    for wrong in (msgspec.structs.replace(ref, seqs=other.seqs), msgspec.structs.replace(ref, size=3)):
        with pytest.raises(LogCorrupted, match="does not match its reference"):
            await Parts(bus).fetch(wrong)


async def test_r20_a_body_over_the_limit_is_refused_and_nothing_of_it_is_stored(bus: Bus) -> None:
    with pytest.raises(Refused, match=r"33554433 bytes is over the limit of 33554432: send less data") as refused:
        await Parts(bus).store(subject(bus), bytes(BODY_BYTES_MAX + 1))
    assert refused.value.code == Code.TOO_LARGE
    assert (await bus.state(bus.subjects.ops_stream)).messages == 0


async def test_a_body_of_the_largest_size_goes_through_and_a_full_stream_says_so(bus: Bus) -> None:
    body = os.urandom(BODY_BYTES_MAX)
    ref = await Parts(bus).store(subject(bus), body)
    assert len(ref.seqs) == 34, "33 554 432 bytes in parts of a million"
    assert await Parts(bus).fetch(ref) == body
    with pytest.raises(BusUnavailable, match=r"the stream is full .* raise its limit with --ops-bytes-max"):
        await Parts(bus).store(subject(bus), body, timeout_s=5.0)
