"""Whatever is in a body of Atropos's wire, its reader refuses it, or makes a record that a trainer can read."""

import gzip
import json
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bombus.errors import Refused
from bombus.hive.trajectories.records import RolloutGroup, decode_group
from bombus_gateway.atropos.batches import write_group
from bombus_gateway.atropos.compression import inflated, takes_gzip
from bombus_gateway.atropos.refusals import write_refusal
from bombus_gateway.atropos.requests import read_environment, read_environment_id, read_trainer
from bombus_gateway.atropos.scored_data import read_scored_data, read_scored_data_list, record_of
from bombus_gateway.atropos.vllm_generate import read_vllm
from tests.gateway.atropos.groups import random_group

READERS: dict[str, Callable[[bytes], object]] = {
    "data": read_scored_data,
    "list": read_scored_data_list,
    "trainer": read_trainer,
    "environment": read_environment,
    "id": read_environment_id,
    "generate": read_vllm,
    "gzip": lambda body: inflated("gzip", body, 1 << 16),
}
BROAD = settings(max_examples=30)


def check(read: Callable[[bytes], object], body: bytes) -> None:
    try:
        made = read(body)
    except Refused as refusal:
        status, answer = write_refusal(refusal)
        assert status in (400, 413, 422)
        assert json.loads(answer)["detail"]
        return
    groups: Sequence[object] = made if isinstance(made, tuple) else (made,)
    for group in groups:
        if isinstance(group, RolloutGroup):
            stored = decode_group(record_of(group))
            written = write_group(stored)
            assert json.loads(written)  # also to Python's reader, which trainers use
            assert read_scored_data(written) == stored


@BROAD
@given(st.binary(max_size=200))
@pytest.mark.parametrize("reader", READERS)
def test_any_bytes_are_read_or_refused(reader: str, body: bytes) -> None:
    check(READERS[reader], body)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_group_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    pieces = [b"NaN", b"-Infinity", b"null", b"true", b"[", b"]", b"{", b'"', b",", b"1e999", b"-1", b"0.5", b"\xff"]
    pieces += [b"9" * 30, b"\\ud800", b"\\", b"[[]]", b" ", b"{}"]
    for number in range(100):
        groups = [random_group(100 * seed + number, environments=3)]
        body = bytearray(json.dumps(groups if number % 2 else groups[0], ensure_ascii=chance.random() < 0.5).encode())
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(body))
            body[start : start + chance.choice((0, 1, 1, 4))] = chance.choice(pieces)
        check(read_scored_data_list if number % 2 else read_scored_data, bytes(body))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("role", "content", "a")), inner),
    max_leaves=8,
)
FIELDS = ["tokens", "masks", "scores", "advantages", "inference_logprobs", "messages", "overrides", "images", "env_id"]
FIELDS += ["distill_token_ids", "distill_logprobs", "group_overrides", "prompt", "logprobs", "stop", "weight", "seed"]


@BROAD
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
@pytest.mark.parametrize("reader", READERS)
def test_any_json_is_read_or_refused(reader: str, body: dict[str, object]) -> None:
    whole = {"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1], "prompt": "a"} | body
    check(READERS[reader], json.dumps(whole).encode())


@BROAD
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255))
def test_damaged_gzip_is_read_or_refused(body: bytes, place: int, byte: int) -> None:
    packed = bytearray(gzip.compress(body) * 2)
    packed[place % len(packed)] = byte
    check(READERS["gzip"], bytes(packed))


@BROAD
@given(st.text(max_size=30))
def test_any_header_says_something(accepted: str) -> None:
    assert takes_gzip(accepted) in (True, False)
