"""What a `retrieve_future` answers, in each state and to each client."""

import msgspec
import pytest

from bombus.errors import Refused
from bombus.operations import Category, Failed
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.futures import (
    LARGE_BYTES,
    FutureAnswer,
    accepted,
    failed,
    read_retrieve,
    ready,
    try_again,
    unknown,
)

TINKERS = read_retrieve(b'{"request_id": "r1", "allow_metadata_only": true}')
XORLS = read_retrieve(b'{"request_id": "r1"}')


def content(answer: FutureAnswer) -> object:
    assert answer.content_type == "application/json"
    return msgspec.json.decode(answer.body)


def test_a_request_says_whose_it_is_and_whether_a_size_will_do() -> None:
    assert (TINKERS.dialect, TINKERS.may_be_size) == (TrainingDialect.TINKER, True)
    again = read_retrieve(b'{"request_id": "r1", "allow_metadata_only": false}')
    assert (again.dialect, again.may_be_size) == (TrainingDialect.TINKER, False)
    assert (XORLS.dialect, XORLS.may_be_size) == (TrainingDialect.XORL, False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"request_id": ""}', b'{"request_id": 1}', b'"\xff"'])
def test_a_request_without_an_id_is_refused(body: bytes) -> None:
    with pytest.raises(Refused):
        read_retrieve(body)


def test_the_answer_to_an_operation_is_the_id_of_its_future() -> None:
    assert content(accepted("S:train:0:3", "S:train:0")) == {"request_id": "S:train:0:3", "model_id": "S:train:0"}


@pytest.mark.parametrize(("request_", "status"), [(TINKERS, 408), (XORLS, 200)])
def test_too_early_is_said_with_the_status_that_the_client_is_silent_about(request_: object, status: int) -> None:
    answer = try_again(request_, "waiting for 2 of 3 trainers", "paused_capacity")  # type: ignore[arg-type]
    assert answer.status == status
    assert content(answer) == {
        "type": "try_again",
        "request_id": "r1",
        "queue_state": "paused_capacity",
        "queue_state_reason": "waiting for 2 of 3 trainers",
    }


def test_a_failure_is_a_result() -> None:
    answer = failed(Failed(error="data[0] has no tokens.", category=Category.USER))
    assert answer.status == 200
    assert content(answer) == {"error": "data[0] has no tokens.", "category": "user"}


def test_a_future_that_nobody_knows_is_gone() -> None:
    assert unknown("r9").status == 410
    assert "'r9'" in str(content(unknown("r9")))


def test_a_large_result_is_first_a_size_to_a_client_that_makes_room() -> None:
    small = FutureAnswer(200, "application/x-protobuf", b"x" * LARGE_BYTES)
    large = FutureAnswer(200, "application/x-protobuf", b"x" * (LARGE_BYTES + 1))
    assert ready(small, TINKERS) is small
    assert content(ready(large, TINKERS)) == {"status": "complete_metadata", "response_payload_size": LARGE_BYTES + 1}
    assert ready(large, read_retrieve(b'{"request_id": "r1", "allow_metadata_only": false}')) is large
    assert ready(large, XORLS) is large
