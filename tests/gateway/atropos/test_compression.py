"""gzip in both directions."""

import gzip
import zlib
from collections.abc import Iterator

import pytest

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.atropos.compression import deflated, inflated, sent, takes_gzip

TEXT = b'{"tokens":[[1,2,3]]}' * 100  # 2,000 bytes
PACKED = gzip.compress(TEXT, mtime=0)  # the same in each process


@pytest.mark.parametrize("encoding", ["gzip", " GZIP ", "x-gzip"])
def test_a_compressed_body_is_read(encoding: str) -> None:
    assert inflated(encoding, gzip.compress(TEXT)) == TEXT


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_a_plain_body_stays_as_it_is(encoding: str) -> None:
    assert inflated(encoding, TEXT) == TEXT


def test_members_are_read_one_after_the_other() -> None:
    assert inflated("gzip", gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"cd")) == b"abcd"


def test_zeros_after_a_member_are_padding() -> None:
    assert inflated("gzip", gzip.compress(b"ab") + bytes(700) + gzip.compress(b"cd") + bytes(3)) == b"abcd"


def test_a_member_that_is_longer_than_what_is_read_at_once_is_read_whole() -> None:
    noise = b"".join(number.to_bytes(4, "little") for number in range(300_000))
    assert inflated("gzip", gzip.compress(noise, 0) + gzip.compress(b"end")) == noise + b"end"


def test_nothing_is_nothing() -> None:
    assert inflated("gzip", b"") == b""


def test_a_body_of_exactly_the_limit_is_read() -> None:
    assert inflated("gzip", gzip.compress(TEXT[:1500]) + gzip.compress(TEXT[1500:]), len(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("encoding", "body", "code", "why"),
    [
        ("gzip", PACKED[:-3], Code.MALFORMED, "it was cut"),
        ("gzip", PACKED + PACKED[:9], Code.MALFORMED, "it was cut"),
        ("gzip", PACKED + b"more", Code.MALFORMED, "other data follows it"),
        ("gzip", TEXT, Code.MALFORMED, "The body is not gzip"),
        ("gzip", PACKED[:-8] + bytes(8), Code.MALFORMED, "data check|checksum"),
        ("gzip", zlib.compress(TEXT), Code.MALFORMED, "The body is not gzip"),
        ("deflate", TEXT, Code.UNSUPPORTED, "the Content-Encoding 'deflate'; send gzip or none"),
        ("gzip, gzip", TEXT, Code.UNSUPPORTED, "send gzip or none"),
    ],
)
def test_what_is_not_gzip_to_its_end_is_refused_with_a_400(encoding: str, body: bytes, code: Code, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        inflated(encoding, body)
    assert (refused.value.code, refused.value.status) == (code, 400)


@pytest.mark.parametrize("members", [[2001], [2000, 1], [1, 2000]])
def test_a_body_that_grows_beyond_the_limit_is_refused(members: list[int]) -> None:
    body = b"".join(gzip.compress(bytes(size)) for size in members)
    with pytest.raises(Refused, match="exceeds the limit when decompressed") as refused:
        inflated("gzip", body, 2000)
    assert refused.value.status == 413


def test_a_bomb_is_refused_without_being_unpacked() -> None:
    bomb = gzip.compress(bytes(128 << 20), 9)
    assert len(bomb) < 200_000
    with pytest.raises(Refused, match="exceeds the limit"):
        inflated("gzip", bomb)


def test_members_without_end_are_refused() -> None:
    with pytest.raises(Refused, match="more than 4096 gzip members") as refused:
        inflated("gzip", gzip.compress(b"") * (limits.GZIP_MEMBERS + 1))
    assert refused.value.status == 413
    assert inflated("gzip", gzip.compress(b"") * limits.GZIP_MEMBERS) == b""


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [
        ("gzip", True),
        ("gzip, deflate", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("br;q=1.0, *;q=0.1", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *", False),
        ("gzipped", False),
    ],
)
def test_a_client_says_whether_it_takes_gzip(accepted: str, takes: bool) -> None:
    assert takes_gzip(accepted) == takes


def parts() -> Iterator[bytes]:
    yield from (TEXT[:600], TEXT[600:1200], TEXT[1200:])


def test_an_answer_of_a_thousand_bytes_is_compressed_for_those_who_take_it() -> None:
    headers, body = sent(parts(), "gzip, deflate")
    assert headers == {"vary": "Accept-Encoding", "content-encoding": "gzip"}
    assert gzip.decompress(b"".join(body)) == TEXT
    headers, body = sent([bytes(1000)], "gzip")
    assert "content-encoding" in headers


@pytest.mark.parametrize(("answer", "accepted"), [([TEXT], ""), ([b"a" * 999], "gzip"), ([], "gzip")])
def test_any_other_answer_is_sent_as_it_is(answer: list[bytes], accepted: str) -> None:
    headers, body = sent(answer, accepted)
    assert (headers, b"".join(body)) == ({"vary": "Accept-Encoding"}, b"".join(answer))


def test_a_part_is_compressed_when_it_is_asked_for() -> None:
    made = []

    def counted() -> Iterator[bytes]:
        for number in range(3):
            made.append(number)
            yield TEXT

    coming = deflated(counted())
    next(coming)
    assert made == [0]
    assert len(list(coming)) == 3  # two parts, and the end
