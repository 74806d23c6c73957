"""Who trainers and environments are."""

import msgspec
import pytest

from bombus_gateway.atropos.refusals import UnfitBody
from bombus_gateway.atropos.requests import (
    EnvironmentRegistration,
    TrainerRegistration,
    read_environment,
    read_environment_id,
    read_trainer,
)

TRAINER: dict[str, object] = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 32,
    "max_token_len": 2048,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": -1,
}
ENVIRONMENT: dict[str, object] = {"max_token_length": 2048, "desired_name": "math", "weight": 1.5, "group_size": 8}


def body(fields: dict[str, object]) -> bytes:
    return msgspec.json.encode(fields)


def test_a_trainer_is_read_and_unknown_fields_are_ignored() -> None:
    assert read_trainer(body(TRAINER | {"color": "red"})) == TrainerRegistration(
        wandb_group="g",
        wandb_project="p",
        batch_size=32,
        max_token_len=2048,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=-1,
    )


@pytest.mark.parametrize("field", TRAINER)
def test_all_that_a_trainer_says_is_needed(field: str) -> None:
    without = {name: value for name, value in TRAINER.items() if name != field}
    with pytest.raises(UnfitBody, match=f"{field} is missing") as refused:
        read_trainer(body(without))
    assert (refused.value.param, refused.value.kind) == (field, "missing")
    with pytest.raises(UnfitBody, match="got `null`") as refused:
        read_trainer(body(TRAINER | {field: None}))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch_size": 0}, "batch_size: Expected `int` >= 1"),
        ({"batch_size": 16385}, "batch_size: Expected `int` <= 16384"),
        ({"batch_size": "many"}, "batch_size: Expected `int`, got `str`"),
        ({"starting_step": -1}, "starting_step: Expected `int` >= 0"),
        ({"num_steps": 1 << 60}, "num_steps: Expected `int` <= 9007199254740992"),
        ({"wandb_group": "a" * 257}, "wandb_group: Expected `str` of length <= 256"),
        ({"checkpoint_dir": "a" * 4097}, "checkpoint_dir: Expected `str` of length <= 4096"),
    ],
)
def test_what_a_trainer_cannot_mean_is_refused_by_its_field(change: dict[str, object], why: str) -> None:
    with pytest.raises(UnfitBody, match=why):
        read_trainer(body(TRAINER | change))


@pytest.mark.parametrize("given", [b"", b"[]", b"{", b"\xff", b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(given: bytes) -> None:
    with pytest.raises(UnfitBody):
        read_trainer(given)


def test_an_environment_may_ask_for_a_part_of_each_batch_or_not() -> None:
    found = read_environment(body(ENVIRONMENT))
    assert found == EnvironmentRegistration(max_token_length=2048, desired_name="math", weight=1.5, group_size=8)
    assert read_environment(body(ENVIRONMENT | {"min_batch_allocation": None})) == found
    assert read_environment(body(ENVIRONMENT | {"min_batch_allocation": 0.25})).min_batch_allocation == 0.25
    assert read_environment(body(ENVIRONMENT | {"weight": 2, "min_batch_allocation": 1})).weight == 2.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"min_batch_allocation": 1.5}, "min_batch_allocation: Expected `float` <= 1.0"),
        ({"group_size": 0}, "group_size: Expected `int` >= 1"),
        ({"desired_name": None}, "desired_name: Expected `str`, got `null`"),
        ({"weight": None}, "weight: Expected `float`, got `null`"),
    ],
)
def test_what_an_environment_cannot_mean_is_refused_by_its_field(change: dict[str, object], why: str) -> None:
    with pytest.raises(UnfitBody, match=why):
        read_environment(body(ENVIRONMENT | change))


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(UnfitBody, match="weight is NaN or infinite"):
        read_environment(body(ENVIRONMENT).replace(b"1.5", b"Infinity"))


def test_an_environment_is_named_by_a_body_or_by_the_query() -> None:
    assert read_environment_id(b'{"env_id":3}') == 3
    assert read_environment_id(b'{"env_id":3}', "4") == 3
    assert read_environment_id(b"", "4") == 4


@pytest.mark.parametrize(
    ("given", "query", "why"),
    [
        (b"", None, "env_id is missing"),
        (b"{}", "4", "env_id is missing"),
        (b'{"env_id":null}', None, "env_id: Expected `int`, got `null`"),
        (b'{"env_id":-1}', None, "env_id: Expected `int` >= 0"),
        (b"", "", "env_id is '', but must be the number of an environment"),
        (b"", "-1", "env_id is '-1'"),
        (b"", "\u0663", "must be the number"),
        (b"", "2147483648", "env_id is '2147483648'"),
        (b"", "9" * 5000, "env_id is '99999"),
    ],
)
def test_no_environment_is_named_by_anything_else(given: bytes, query: str | None, why: str) -> None:
    with pytest.raises(UnfitBody, match=why) as refused:
        read_environment_id(given, query)
    assert refused.value.param == "env_id"
