"""What simdjson reads of rollout groups is what the other reader reads, or nothing."""

import json
import random
from typing import Any

import pytest

from bombus.errors import Refused
from bombus.hive.trajectories.records import RolloutGroup
from bombus_gateway.atropos.plain import PLAIN_BYTES, read_plain
from bombus_gateway.atropos.scored_data import read_scored_data
from tests.gateway.atropos.groups import random_group

pytest.importorskip("simdjson")

GROUP: dict[str, Any] = {"tokens": [[5, 6], [7]], "masks": [[-100, 6], [7]], "scores": [1.0, -0.5]}


def body(**change: object) -> bytes:
    return json.dumps(GROUP | change).encode()


def carefully(given: bytes) -> RolloutGroup | str:
    """Return what the other reader makes of a body: simdjson's does not take one that begins with a space."""
    return quickly(b" " + given)


def quickly(given: bytes) -> RolloutGroup | str:
    try:
        return read_scored_data(given)
    except Refused as refusal:
        return refusal.why


@pytest.mark.parametrize("seed", range(100))
def test_both_readers_make_the_same_record(seed: int) -> None:
    group = random_group(seed, environments=3)
    group.pop("of_no_use", None)
    given = json.dumps(group, ensure_ascii=seed % 2 == 0).encode()
    assert read_plain(b" " + given) is None
    assert quickly(given) == carefully(given)


def test_groups_as_programs_write_them_are_read_here() -> None:
    beside = [[1.0, -0.25], [-1e-3]]
    for change in (
        {},
        {"advantages": [[1.0], []], "ref_logprobs": None, "env_id": 4},
        {"advantages": beside, "ref_logprobs": beside, "inference_logprobs": [[1.0, -0.5], [-2.0]]},
        {"messages": [[{"role": "user", "content": "[[[ü"}], []], "overrides": [{}], "images": [["a"]]},
        {"scores": [1, 0], "generation_params": {"stop": ["]", "["]}},
    ):
        assert read_plain(body(**change)) is not None
        assert quickly(body(**change)) == carefully(body(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [[5.0, 6], [7]]},
        {"tokens": [[True, 6], [7]]},
        {"tokens": [[5, -6], [7]]},
        {"tokens": [[5, 1 << 31], [7]]},
        {"tokens": [[5, 1 << 70], [7]]},
        {"tokens": [[5, 6], []]},
        {"tokens": [[5, 6], 7]},
        {"tokens": [["5", 6], [7]]},
        {"tokens": "ab"},
        {"tokens": []},
        {"masks": [[-(1 << 31) - 1, 6], [7]]},
        {"masks": [[1], [7, 8]]},
        {"scores": [1.0]},
        {"scores": [1.0, True]},
        {"scores": [1.0, None]},
        {"scores": 1.0},
        {"advantages": []},
        {"inference_logprobs": [[1.0, float("nan")], [1.0]]},
        {"inference_logprobs": [[1.0], [1.0, 2.0]]},
        {"env_id": True},
        {"env_id": -1},
        {"env_id": 1.0},
        {"distill_token_ids": [[[1], [2]], [[3]]]},
        {"of_no_use": [1]},
    ],
)
def test_what_is_not_plain_is_left_to_the_other_reader(change: dict[str, object]) -> None:
    assert read_plain(body(**change)) is None
    assert quickly(body(**change)) == carefully(body(**change))


def test_lists_within_rows_are_refused_as_the_other_reader_refuses_them() -> None:
    for change in (
        {"tokens": [[5, [6]], [7]]},
        {"scores": [1.0, [2.0]]},
        {"inference_logprobs": [[1.0, [2.0]], [1.0]]},
    ):
        found = quickly(body(**change))
        assert found == carefully(body(**change))
        assert "got `array`" in str(found)


def test_a_field_that_comes_twice_counts_as_the_other_reader_counts_it() -> None:
    given = body()[:-1] + b',"scores":[3.0,4.0]}'
    assert read_plain(given) is None
    assert quickly(given) == carefully(given)


@pytest.mark.parametrize("given", [b"", b"[]", b"5", b"{}", b'{"tokens":', b"\xef\xbb\xbf" + body(), body() + b"x"])
def test_what_is_no_group_is_left_to_the_other_reader(given: bytes) -> None:
    assert read_plain(given) is None


def test_a_very_large_group_is_left_to_the_other_reader() -> None:
    assert read_plain(body(images="a" * PLAIN_BYTES)) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_group_is_read_alike_by_both(seed: int) -> None:
    chance = random.Random(seed)
    pieces = [b"NaN", b"null", b"true", b"[", b"]", b"{", b'"', b",", b"1e999", b"-1", b"-0", b"0.5", b"9" * 20, b" "]
    for number in range(200):
        group = random_group(200 * seed + number, environments=3)
        group.pop("of_no_use", None)
        damaged = bytearray(json.dumps(group).encode())
        start = chance.randrange(1, len(damaged))
        damaged[start : start + chance.choice((0, 1, 4))] = chance.choice(pieces)
        quick, careful = quickly(bytes(damaged)), carefully(bytes(damaged))
        assert quick == careful or (isinstance(quick, str) and isinstance(careful, str))
