"""Which client a request is from."""

import pytest

from bombus_gateway.operations_wire.dialects import (
    TrainingDialect,
    dialect_of,
    sampling_session,
    session_of,
    tinker_model,
)

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL
PROTOBUF, JSON = "application/x-protobuf", "application/json"


@pytest.mark.parametrize(
    ("route", "fields", "dialect"),
    [
        ("create_model", {"session_id", "model_seq_id", "base_model"}, TINKER),
        ("create_model", {"model_id", "base_model"}, XORL),
        ("create_model", set(), XORL),
        ("retrieve_future", {"request_id", "allow_metadata_only"}, TINKER),
        ("retrieve_future", {"request_id"}, XORL),
        ("create_session", {"tags", "sdk_version"}, TINKER),
        ("create_session", {"session_id"}, XORL),
        ("create_sampling_session", {"model_path", "sampling_session_seq_id"}, TINKER),
        ("create_sampling_session", {"model_path"}, XORL),
        ("save_weights_for_sampler", {"model_id", "path"}, TINKER),
        ("save_weights_for_sampler", {"model_id", "sampling_session_seq_id"}, TINKER),
        ("save_weights_for_sampler", {"model_id", "name"}, XORL),
        ("load_weights", {"session_id", "model_seq_id", "path"}, TINKER),
        ("load_weights", {"model_id", "path"}, XORL),
        ("weights_info", {"tinker_path"}, TINKER),
        ("weights_info", {"xorl_path"}, XORL),
        ("client/config", {"sdk_version"}, TINKER),
        ("asample", {"prompt"}, TINKER),
        ("forward", {"model_id"}, XORL),
        ("kill_session", {"model_id"}, XORL),
        ("optim_step", {"model_id", "adam_params"}, XORL),
    ],
)
def test_a_body_shows_whose_it_is(route: str, fields: set[str], dialect: TrainingDialect) -> None:
    assert dialect_of(f"/api/v1/{route}", JSON, fields) == dialect
    assert dialect_of(f"/behind/a/prefix/api/v1/{route}/", JSON, fields) == dialect


@pytest.mark.parametrize(
    ("content_type", "dialect"),
    [(PROTOBUF, TINKER), ("Application/X-Protobuf; charset=x", TINKER), (JSON, XORL), ("", XORL)],
)
def test_forward_backward_is_told_by_what_is_in_its_body(content_type: str, dialect: TrainingDialect) -> None:
    assert dialect_of("/api/v1/forward_backward", content_type, ()) == dialect


@pytest.mark.parametrize("route", ["optim_step", "load_weights", "save_weights", "forward_backward"])
def test_a_model_with_an_id_of_tinkers_decides(route: str) -> None:
    assert dialect_of(f"/api/v1/{route}", JSON, {"model_id"}, "S:train:0") == TINKER
    assert dialect_of(f"/api/v1/{route}", JSON, {"model_id"}, "default") == XORL


def test_ids_follow_the_clients_formula() -> None:
    assert tinker_model("S", 3) == "S:train:3"
    assert session_of("S:train:3") == "S"
    assert sampling_session("S", 0) == "S:sample:0"
