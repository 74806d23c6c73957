"""Rollout groups that environments push."""

import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from bombus.errors import Refused
from bombus.hive.records import BODY_BYTES_MAX
from bombus.hive.trajectories.records import PackedCandidates, PackedFloats, RolloutGroup, decode_group, pack_ints
from bombus_gateway import limits
from bombus_gateway.atropos.batches import write_group
from bombus_gateway.atropos.refusals import UnfitBody, write_refusal
from bombus_gateway.atropos.scored_data import BY_ROW_BYTES, read_scored_data, read_scored_data_list, record_of
from tests.gateway.atropos.groups import random_group

GROUP: dict[str, Any] = {"tokens": [[5, 6], [7]], "masks": [[-100, 6], [7]], "scores": [1.0, -0.5]}


PADDING = "a" * BY_ROW_BYTES  # in a field that nobody knows: it makes a group a large one


def body(**change: object) -> bytes:
    return json.dumps(GROUP | change).encode()


def peak_bytes(do: Callable[[], object]) -> int:
    """Return how much memory Python's objects take at most while something is done."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_three_fields_are_a_group() -> None:
    assert read_scored_data(body()) == RolloutGroup(
        lengths=pack_ints([2, 1]),
        tokens=pack_ints([5, 6, 7]),
        masks=pack_ints([-100, 6, 7]),
        scores=PackedFloats.of([1.0, -0.5]),
    )


def test_all_fields_are_read_and_what_nobody_computes_with_is_kept_as_it_came() -> None:
    given = body(
        advantages=[[0.5, 0.5], [2]],
        ref_logprobs=[[1.0, -1.0], [-2.0]],
        inference_logprobs=[[1.0, -3.0], [-4.0]],
        generation_params={"temperature": 1e0},
        messages=[[{"role": "user", "content": "é"}], []],
        overrides=[{}, {"set_advantage_to_zero": True}],
        group_overrides={"group_size": 2},
        images=["a", None],
        env_id=4,
        distill_token_ids=[[[], [6, 9]], [[7]]],
        distill_logprobs=[[[], [-0.5, -1.5]], [[0]]],
        something="else",
    )
    counts = pack_ints([0, 2, 1])
    assert read_scored_data(given) == RolloutGroup(
        lengths=pack_ints([2, 1]),
        tokens=pack_ints([5, 6, 7]),
        masks=pack_ints([-100, 6, 7]),
        scores=PackedFloats.of([1.0, -0.5]),
        advantages=PackedFloats.of([0.5, 0.5, 2.0]),
        ref_logprobs=PackedFloats.of([1.0, -1.0, -2.0]),
        inference_logprobs=PackedFloats.of([1.0, -3.0, -4.0]),
        generation_params=b'{"temperature": 1.0}',
        messages=b'[[{"role": "user", "content": "\\u00e9"}], []]',
        overrides=b'[{}, {"set_advantage_to_zero": true}]',
        group_overrides=b'{"group_size": 2}',
        images=b'["a", null]',
        environment=4,
        distill_token_ids=PackedCandidates(counts=counts, tokens=pack_ints([6, 9, 7])),
        distill_logprobs=PackedCandidates(counts=counts, logprobs=PackedFloats.of([-0.5, -1.5, 0.0])),
    )


@pytest.mark.parametrize("rows", [[[1.0], [1.0]], [[0.5, 0.25, 2.0], []], [[1.0]]])
def test_advantages_may_be_others_than_one_for_each_token_and_come_back_as_they_were(rows: list[list[float]]) -> None:
    """Atropos's own tests send four of them for three tokens."""
    found = read_scored_data(body(advantages=rows))
    assert decode_group(record_of(found)) == found
    assert json.loads(write_group(found))["advantages"] == rows


def test_null_is_the_same_as_nothing() -> None:
    names = ["advantages", "ref_logprobs", "inference_logprobs", "generation_params", "messages", "overrides"]
    names += ["group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs"]
    assert read_scored_data(body(**dict.fromkeys(names))) == read_scored_data(body())


def test_programs_write_whole_numbers_as_floats_and_flags_for_numbers() -> None:
    given = body(tokens=[[5.0, 6], [7.0]], masks=[[-1e2, 6], [7]], scores=[True, False])
    found = read_scored_data(given)
    assert found.tokens == pack_ints([5, 6, 7])
    assert found.masks == pack_ints([-100, 6, 7])
    assert found.scores == PackedFloats.of([1.0, 0.0])
    assert read_scored_data(body(masks=[[False, True], [True]])).masks == pack_ints([0, 1, 1])
    assert read_scored_data(body(distill_token_ids=[[[True], [6.0]], [[]]])).distill_token_ids == PackedCandidates(
        counts=pack_ints([1, 1, 0]), tokens=pack_ints([1, 6])
    )


@pytest.mark.parametrize(
    ("change", "place", "why"),
    [
        ({"tokens": []}, "tokens", "tokens has 0 sequences, but a group must have 1 to 16384"),
        ({"tokens": [[5, 6], []]}, "tokens[1]", "is a sequence without tokens; leave it out of its group"),
        ({"tokens": [[5, -6], [7]]}, "tokens[0][1]", "Expected `int` >= 0"),
        ({"tokens": [[5, 1 << 31], [7]]}, "tokens[0][1]", "Expected `int` <= 2147483647"),
        ({"tokens": [[5, -6.0], [7]]}, "tokens[0][1]", "is -6.0, but must be a whole number from 0 to 2147483647"),
        ({"tokens": [[5, 6.5], [7]]}, "tokens[0][1]", "is 6.5, but must be a whole number"),
        ({"tokens": [[5, 4e9], [7]]}, "tokens[0][1]", "is 4000000000.0, but must be a whole number"),
        ({"tokens": [[5, "6"], [7]]}, "tokens[0][1]", "got `str`"),
        ({"tokens": [[5, None], [7]]}, "tokens[0][1]", "got `null`"),
        ({"tokens": [5, 6]}, "tokens[0]", "Expected `array`, got `int`"),
        ({"tokens": None}, "tokens", "Expected `array`, got `null`"),
        ({"masks": [[-100, 6]]}, "masks", "masks has 1 rows for 2 sequences; send one for each"),
        ({"masks": [[-100], [7]]}, "masks[0]", "has 1 values for the 2 tokens of its sequence"),
        ({"masks": [[-100, 6], [7, 8]]}, "masks[1]", "has 2 values for the 1 tokens of its sequence"),
        ({"masks": [[-(1 << 31) - 1, 6], [7]]}, "masks[0][0]", "Expected `int` >= -2147483648"),
        ({"scores": [1.0]}, "scores", "scores has 1 numbers for 2 sequences"),
        ({"scores": [1.0, float("nan")]}, "scores[1]", "is NaN or infinite; send finite numbers"),
        ({"scores": [1.0, None]}, "scores[1]", "got `null`"),
        ({"advantages": [[1.0, float("inf")], [1.0]]}, "advantages[0][1]", "is NaN or infinite"),
        ({"advantages": [1.0, 2.0]}, "advantages[0]", "Expected `array`, got `float`"),
        ({"advantages": []}, "advantages", "has no rows; send one for each sequence, or null"),
        ({"ref_logprobs": [[1.0, 1.0], []]}, "ref_logprobs[1]", "has 0 values for the 1 tokens"),
        ({"inference_logprobs": [[1.0, 1.0]]}, "inference_logprobs", "has 1 rows for 2 sequences"),
        ({"inference_logprobs": [[1.0, -float("inf")], [1.0]]}, "inference_logprobs[0][1]", "is NaN or infinite"),
        ({"distill_token_ids": [[[1]], [[1]]]}, "distill_token_ids[0]", "has 1 values for the 2 tokens"),
        ({"distill_token_ids": [[[1], [1.5]], [[1]]]}, "distill_token_ids[0][1][0]", "is 1.5, but must be"),
        ({"distill_logprobs": [[[1.0], [1.0]]]}, "distill_logprobs", "has 1 rows for 2 sequences"),
        (
            {"distill_token_ids": [[[1], [1]], [[1]]], "distill_logprobs": [[[1.0], []], [[1.0]]]},
            "distill_logprobs",
            "differ in how many candidates a token has",
        ),
        ({"messages": [[{"role": "user"}]]}, "messages[0][0].content", "is missing"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0]", "Expected `array`, got `object`"),
        (
            {"messages": [[{"role": "user", "content": "", "reward": float("nan")}]]},
            "messages[0][0].reward",
            "is NaN or infinite",
        ),
        ({"generation_params": []}, "generation_params", "Expected `object`, got `array`"),
        ({"overrides": {}}, "overrides", "Expected `array`, got `object`"),
        ({"overrides": [{}, 1]}, "overrides[1]", "Expected `object`, got `int`"),
        ({"group_overrides": "a"}, "group_overrides", "Expected `object`, got `str`"),
        ({"env_id": -1}, "env_id", "Expected `int` >= 0"),
        ({"env_id": "1"}, "env_id", "Expected `int | null`, got `str`"),
    ],
)
def test_what_is_wrong_with_a_group_is_refused_with_its_place(change: dict[str, object], place: str, why: str) -> None:
    for padding in ({}, {"padding": PADDING}):
        with pytest.raises(UnfitBody) as refused:
            read_scored_data(body(**padding, **change))
        assert refused.value.param == place
        assert why in refused.value.why
    with pytest.raises(UnfitBody) as refused:
        read_scored_data_list(b"[" + body() + b"," + body(**change) + b"]")
    assert refused.value.param == f"[1].{place}"
    assert why in refused.value.why


@pytest.mark.parametrize("field", GROUP)
def test_a_field_that_is_missing_is_named_as_fastapi_names_it(field: str) -> None:
    given = {name: value for name, value in GROUP.items() if name != field}
    with pytest.raises(UnfitBody) as refused:
        read_scored_data(json.dumps(given).encode())
    status, answer = write_refusal(refused.value)
    assert (status, json.loads(answer)) == (
        422,
        {"detail": [{"type": "missing", "loc": ["body", field], "msg": f"{field} is missing."}]},
    )


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b"NaN",
        b'{"tokens": NaN',
        b"\xff\xfe",
        body()[:-1] + b',"images":"\xff"}',
        body(images="\ud800\ud800")[:-1],
        b'{"tokens":' + b"[" * 5000,
    ],
)
def test_what_is_not_json_is_refused(given: bytes) -> None:
    with pytest.raises(UnfitBody):
        read_scored_data(given)


def test_the_word_nan_in_a_text_is_a_word() -> None:
    assert read_scored_data(body(images="NaN")).images == b'"NaN"'
    with pytest.raises(UnfitBody, match="could not be read as JSON"):
        read_scored_data(body(images="NaN").replace(b"5,", b"5,,"))


def test_what_is_not_finite_is_found_whatever_comes_before_it() -> None:
    given = body(generation_params={"a": [1, "NaN", None, {}, [], 10**400, [2.0, [True]]]})
    with pytest.raises(UnfitBody, match="is NaN or infinite") as refused:
        read_scored_data(given.replace(b"[2.0, [true]]", b"[2.0, [true, -Infinity]]"))
    assert refused.value.param == "generation_params.a[6][1][1]"


def test_a_number_beyond_all_floats_is_refused_where_it_stands() -> None:
    with pytest.raises(UnfitBody, match="Number out of range") as refused:
        read_scored_data(body().replace(b"-0.5", b"-1e999"))
    assert refused.value.param == "scores[1]"


def test_half_a_character_becomes_one_that_all_can_read() -> None:
    assert read_scored_data(body(images="a\ud83d")).images == rb'"a\ufffd"'


@pytest.mark.parametrize("seed", range(40))
def test_a_large_group_is_read_as_a_small_one(seed: int) -> None:
    group = random_group(seed, environments=3)
    found = read_scored_data(json.dumps(group | {"padding": PADDING}).encode())
    assert found == read_scored_data(json.dumps(group).encode())


def test_a_large_group_is_never_in_memory_as_lists_of_python() -> None:
    """Whatever decodes millions of numbers at once keeps the interpreter, and so the gateway's other clients."""
    chance = random.Random(1)
    rows = [[chance.randrange(128_000) for _ in range(10_000)] for _ in range(32)]
    numbers = [[chance.random() for _ in row] for row in rows]
    given = body(tokens=rows, masks=rows, scores=[1.0] * 32, inference_logprobs=numbers)
    assert peak_bytes(lambda: read_scored_data(given)) < 2 * len(given)  # four times as much with lists


@pytest.mark.parametrize("kept", [[[1.0, 2.0]] * (1 << 17), ["a"] * (1 << 19), [{}] * (1 << 19)])
def test_nan_at_the_end_of_a_large_body_is_found_without_decoding_it(kept: list[object]) -> None:
    given = body(images=kept).replace(b"-0.5", b"NaN")  # scores come before the images
    turned = given[:-1] + b',"scores":[1.0,NaN]}'

    def refused(text: bytes) -> str:
        with pytest.raises(UnfitBody, match=r"scores\[1\] is NaN") as found:
            read_scored_data(text)
        return found.value.param

    assert refused(given) == "scores[1]"
    if len(kept) < 1 << 18:
        assert refused(turned) == "scores[1]"
        assert peak_bytes(lambda: refused(turned)) < 3 * len(turned)


def test_nan_after_too_much_to_look_through_is_told_by_its_byte() -> None:
    given = body(images=[{}] * (1 << 19))[:-1] + b',"advantages":[NaN]}'
    with pytest.raises(UnfitBody, match=f"The number at byte {len(given) - 5} is NaN or infinite") as found:
        read_scored_data(given)
    assert found.value.param == ""


def test_a_sequence_has_a_length_that_is_decoded_at_once() -> None:
    given = body(tokens=[[1] * (limits.SEQUENCE_NUMBERS + 1), [7]])
    with pytest.raises(UnfitBody, match=r"tokens\[0\] has more than 1048576 values; send shorter sequences"):
        read_scored_data(given)


def test_a_body_is_utf8_wherever_it_is_cut() -> None:
    text = "aé" * (1 << 19)  # two bytes of three are one character, so some of them lie across the chunks
    assert (
        json.loads(read_scored_data(json.dumps(GROUP | {"images": text}, ensure_ascii=False).encode()).images) == text
    )
    damaged = json.dumps(GROUP | {"images": text}, ensure_ascii=False).encode()[:-3] + b'"}'
    with pytest.raises(UnfitBody, match=f"The body is not UTF-8: .* in position {len(damaged) - 3}"):
        read_scored_data(damaged)


def test_a_list_is_read_in_order_and_may_be_empty() -> None:
    groups = read_scored_data_list(b"[" + body(env_id=1) + b"," + body(env_id=2) + b"]")
    assert [group.environment for group in groups] == [1, 2]
    assert read_scored_data_list(b"[]") == ()
    with pytest.raises(UnfitBody, match="Expected `array`, got `object`"):
        read_scored_data_list(body())


def test_more_groups_than_the_limit_is_413() -> None:
    with pytest.raises(Refused, match="1025 groups in one request are over the limit of 1024") as refused:
        read_scored_data_list(b"[" + b"{}," * limits.TRAJECTORY_GROUPS + b"{}]")
    assert write_refusal(refused.value)[0] == 413


def test_a_record_that_cannot_be_stored_is_refused_before_it_is() -> None:
    assert decode_group(record_of(read_scored_data(body()))) == read_scored_data(body())
    large = read_scored_data(body(images="a" * BODY_BYTES_MAX))
    with pytest.raises(Refused, match=r"A group takes 335545\d\d bytes, but the limit is 33554432") as refused:
        record_of(large)
    assert refused.value.status == 413
