"""Refusals in FastAPI's form."""

import json

import pytest

from bombus.errors import Code, Refused
from bombus_gateway.atropos.refusals import UnfitBody, place_in, write_batch_refusal, write_refusal


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        ("", []),
        ("tokens", ["tokens"]),
        ("tokens[1][20]", ["tokens", 1, 20]),
        ("[3].scores[0]", [3, "scores", 0]),
        ("messages[0][1].role", ["messages", 0, 1, "role"]),
        ("group_overrides[...].a b", ["group_overrides", "a b"]),
    ],
)
def test_a_place_is_told_step_by_step(place: str, steps: list[str | int]) -> None:
    assert place_in(place) == steps


def test_a_body_that_does_not_fit_is_422_with_its_place() -> None:
    status, body = write_refusal(UnfitBody("masks[0]", "masks[0] is too short."))
    assert (status, json.loads(body)) == (
        422,
        {"detail": [{"type": "value_error", "loc": ["body", "masks", 0], "msg": "masks[0] is too short."}]},
    )


def test_any_other_refusal_has_its_own_status_and_a_sentence() -> None:
    assert write_refusal(Refused(Code.TOO_LARGE, "Too many.")) == (413, b'{"detail":"Too many."}')


def test_a_refusal_of_a_batch_is_an_error_to_trainers_that_look_at_neither_its_status_nor_its_detail() -> None:
    status, body = write_batch_refusal(Refused(Code.OVERLOADED, "Ask again."))
    assert (status, json.loads(body)) == (
        503,
        {"detail": "Ask again.", "status": "error", "message": "Ask again.", "batch": None},
    )


def test_what_a_refusal_quotes_is_cut() -> None:
    _, body = write_refusal(UnfitBody("a" * 5000, "b" * 5000))
    assert json.loads(body)["detail"] == [
        {"type": "value_error", "loc": ["body", "a" * 1000 + " ..."], "msg": "b" * 1000 + " ..."}
    ]
