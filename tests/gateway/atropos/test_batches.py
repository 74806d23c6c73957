"""Batches that trainers read."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from bombus.hive.trajectories.records import RolloutGroup, decode_group
from bombus_gateway.atropos.batches import NO_BATCH, write_batch, write_group, write_latest
from bombus_gateway.atropos.scored_data import read_scored_data, read_scored_data_list, record_of
from tests.gateway.atropos.groups import Group, random_group

FIELDS = {
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "generation_params",
    "messages",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
}


def through_the_log(group: Group) -> RolloutGroup:
    return decode_group(record_of(read_scored_data(json.dumps(group).encode())))


def expected(group: Group) -> Group:
    return dict.fromkeys(FIELDS) | {name: value for name, value in group.items() if name in FIELDS}


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_a_trainer_reads_the_values_that_were_sent(first: int) -> None:
    for seed in range(first, first + 250):
        group = random_group(seed, environments=5)
        assert json.loads(write_group(through_the_log(group))) == expected(group), f"seed {seed}"


def test_numbers_that_stand_for_floats_are_floats() -> None:
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1], "inference_logprobs": [[-0.0]]}
    text = write_group(through_the_log(group))
    assert b'"scores":[1.0]' in text
    assert math.copysign(1.0, json.loads(text)["inference_logprobs"][0][0]) == -1.0


def test_a_batch_is_made_group_by_group() -> None:
    groups = [random_group(seed) for seed in range(3)]
    read: list[int] = []

    def counted() -> Iterator[RolloutGroup]:
        for number, group in enumerate(groups):
            read.append(number)
            yield through_the_log(group)

    parts = write_batch(counted())
    first = next(parts)
    assert read == [0]
    assert json.loads(first + b"".join(parts)) == {"batch": [expected(group) for group in groups]}


def test_a_batch_of_nothing_is_a_batch() -> None:
    assert json.loads(b"".join(write_batch([]))) == {"batch": []}
    assert json.loads(NO_BATCH) == {"batch": None}


def test_groups_of_a_list_are_those_that_were_sent() -> None:
    groups = [random_group(seed) for seed in range(20)]
    read = read_scored_data_list(json.dumps(groups).encode())
    assert [json.loads(write_group(group)) for group in read] == [expected(group) for group in groups]


def test_the_latest_example_is_a_group_or_empty_lists() -> None:
    group = random_group(1)
    assert json.loads(write_latest(through_the_log(group))) == expected(group)
    empty: dict[str, Any] = json.loads(write_latest(None))
    assert set(empty) == FIELDS - {"overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs"}
    assert all(value == [] for value in empty.values())
