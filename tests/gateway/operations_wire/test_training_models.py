"""New models, in both dialects, and their end."""

import msgspec
import pytest

from bombus.errors import Code, Refused
from bombus.operations import AdapterPart, AdapterSpec, CreateModel, EndModel, Failed
from bombus_gateway import limits
from bombus_gateway.operations_wire.dialects import TrainingDialect
from bombus_gateway.operations_wire.models import (
    AdapterDefaults,
    drawn_seed,
    read_create_by_load,
    read_create_model,
    read_end_model,
)
from bombus_gateway.operations_wire.submission import Submission

TINKER, XORL = TrainingDialect.TINKER, TrainingDialect.XORL
PLAIN = AdapterDefaults()
BOTH = (AdapterPart.ATTENTION, AdapterPart.MLP)
LORA: dict[str, object] = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
CREATE: dict[str, object] = {"session_id": "S", "model_seq_id": 0, "base_model": "org/name", "type": "create_model"}


def created(dialect: TrainingDialect, fields: dict[str, object], defaults: AdapterDefaults = PLAIN) -> Submission:
    return read_create_model(dialect, msgspec.json.encode(fields), defaults)


def error(submission: Submission) -> str:
    assert isinstance(submission.operation, Failed)
    return submission.operation.error


def test_tinkers_model_has_the_id_that_its_client_derives() -> None:
    submission = created(
        TINKER,
        {**CREATE, "lora_config": LORA, "user_metadata": {"k": "v"}, "optimizer_config": {"type": "adamw"}},
    )
    assert (submission.model, submission.seq, submission.metadata) == ("S:train:0", 0, {"k": "v"})
    assert submission.operation == CreateModel(
        base="org/name", adapter=AdapterSpec(rank=8, alpha=32.0, seed=1, parts=BOTH)
    )


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ({"train_mlp": False}, (AdapterPart.ATTENTION, AdapterPart.UNEMBEDDING)),
        ({"train_attn": False, "train_unembed": False}, (AdapterPart.MLP,)),
        ({}, (AdapterPart.ATTENTION, AdapterPart.MLP, AdapterPart.UNEMBEDDING)),
    ],
)
def test_a_server_that_has_adapters_on_the_unembedding_gives_them(
    lora: dict[str, object], parts: tuple[AdapterPart, ...]
) -> None:
    submission = created(TINKER, {**CREATE, "lora_config": {**LORA, **lora}}, AdapterDefaults(unembedding=True))
    assert submission.operation == CreateModel(
        base="org/name", adapter=AdapterSpec(rank=8, alpha=32.0, seed=1, parts=parts)
    )


def seed_of(submission: Submission) -> int:
    assert isinstance(submission.operation, CreateModel)
    assert submission.operation.adapter is not None
    return submission.operation.adapter.seed


def test_models_without_a_seed_differ_and_a_request_that_comes_again_is_the_same() -> None:
    unseeded: list[dict[str, object]] = [
        {**CREATE, "session_id": session, "model_seq_id": number, "lora_config": {"rank": 8, "seed": None}}
        for session in ("S", "T")
        for number in (0, 1)
    ]
    assert len({seed_of(created(TINKER, fields)) for fields in unseeded}) == 4
    assert created(TINKER, unseeded[0]) == created(TINKER, unseeded[0])
    assert seed_of(created(TINKER, {**unseeded[0], "lora_config": {"rank": 8, "seed": 0}})) == 0
    named: list[dict[str, object]] = [{"model_id": name, "base_model": "org/name"} for name in ("policy", "reference")]
    assert len({seed_of(created(XORL, fields)) for fields in named}) == 2


def test_rank_zero_is_a_model_of_full_weights() -> None:
    assert created(TINKER, {**CREATE, "lora_config": {"rank": 0}}).operation == CreateModel(base="org/name")


@pytest.mark.parametrize(
    ("lora", "adapter"),
    [
        (None, AdapterSpec(rank=32, alpha=32.0)),
        ({"rank": 16, "dropout": 0.0}, AdapterSpec(rank=16, alpha=32.0)),
        ({"lora_rank": 16, "lora_alpha": 64}, AdapterSpec(rank=16, alpha=64.0)),
        (
            {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            AdapterSpec(rank=4, alpha=8.0, targets=("q_proj", "v_proj")),
        ),
    ],
)
def test_xorls_model_has_the_name_and_the_adapter_that_it_gives(lora: object, adapter: AdapterSpec) -> None:
    submission = created(XORL, {"model_id": "mine", "base_model": "org/name", "lora_config": lora})
    assert submission.model == "mine"
    seeded = msgspec.structs.replace(adapter, seed=drawn_seed("mine"))
    assert submission.operation == CreateModel(base="org/name", adapter=seeded)


def test_a_server_of_full_weights_gives_xorl_no_adapter() -> None:
    full = AdapterDefaults(full_weights=True)
    submission = created(XORL, {"base_model": "org/name", "lora_config": {"rank": 32}}, full)
    assert (submission.model, submission.operation) == ("default", CreateModel(base="org/name"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_model": ""}, "base_model is missing"),
        ({"base_model": 5}, "base_model: Expected `str`"),
        ({"lora_config": {"rank": -1}}, "The rank of an adapter must be 1 to 4096, not -1"),
        ({"lora_config": {"rank": 8, "dropout": 0.1}}, "dropout of 0.1 is not offered"),
        ({"lora_config": {"rank": 8, "target_modules": [""]}}, "target_modules must be at most 64 layer names"),
        ({"lora_config": {"rank": 8, "train_mlp": False, "train_attn": False}}, "Nothing would be trained"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "The optimizer 'dimuon' is not offered"),
        (
            {"user_metadata": {"k": "v" * limits.USER_METADATA_BYTES}},
            "user_metadata has 4104 bytes, but the limit is 4096",
        ),
    ],
)
def test_a_model_that_cannot_be_made_fails_in_words(fields: dict[str, object], why: str) -> None:
    submission = created(TINKER, {**CREATE, **fields})
    assert submission.model == "S:train:0"
    assert why in error(submission)


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (TINKER, {"session_id": "S"}),
        (TINKER, {"session_id": "S", "model_seq_id": -1}),
        (TINKER, {"session_id": "../up", "model_seq_id": 0}),
        (XORL, {"model_id": "S:train:0"}),
        (XORL, {"model_id": "a/b"}),
    ],
)
def test_a_model_that_could_not_have_a_name_is_refused(dialect: TrainingDialect, fields: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        created(dialect, fields)
    assert refused.value.code == Code.MALFORMED


def by_load(**fields: object) -> Submission:
    body = {"session_id": "S", "model_seq_id": 1, "path": "tinker://R:train:0/weights/a", "optimizer": True, **fields}
    return read_create_by_load(msgspec.json.encode(body))


def test_a_model_may_begin_with_a_checkpoint() -> None:
    submission = by_load(user_metadata={"k": "1"})
    assert (submission.model, submission.seq, submission.metadata) == ("S:train:1", 0, {"k": "1"})
    assert submission.operation == CreateModel(base="", checkpoint="R:train:0/training/a", with_optimizer=True)
    assert by_load(base_model="b", optimizer=False).operation == CreateModel(
        base="b", checkpoint="R:train:0/training/a"
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"path": "a"}, "'a' is not the path of a checkpoint"),
        ({"weights_access_token": "t"}, "weights_access_token is not supported"),
        ({"optimizer_config": {"type": "dimuon"}}, "The optimizer 'dimuon' is not offered"),
    ],
)
def test_a_model_that_cannot_begin_with_a_checkpoint_fails_in_words(fields: dict[str, object], why: str) -> None:
    assert why in error(by_load(**fields))


@pytest.mark.parametrize(
    ("body", "save_as", "operation"),
    [
        (b'{"model_id": "m"}', "last", EndModel(save_as="last", ttl_s=30 * 86_400.0)),
        (b'{"model_id": "m", "save_checkpoint": false, "reset_weights": true}', "last", EndModel(reset_weights=True)),
        (b'{"session_id": "m", "type": "unload_model"}', "", EndModel()),
    ],
)
def test_a_model_ends_and_is_saved_first_where_that_is_wanted(body: bytes, save_as: str, operation: EndModel) -> None:
    submission = read_end_model(body, save_as)
    assert (submission.model, submission.operation) == ("m", operation)
