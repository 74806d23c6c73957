"""The small requests of trainers and environments: registrations, and the ids of environments and batches."""

from typing import Annotated

import msgspec
from msgspec import Meta

from bombus_gateway import limits
from bombus_gateway.atropos.json_body import decode_at
from bombus_gateway.atropos.refusals import UnfitBody

_INT53 = 1 << 53
_Whole = Annotated[int, Meta(ge=-_INT53, le=_INT53)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_Size = Annotated[int, Meta(ge=1, le=limits.GROUP_SEQUENCES)]
_Name = Annotated[str, Meta(max_length=limits.ENVIRONMENT_CHARACTERS)]
_Folder = Annotated[str, Meta(max_length=limits.CHECKPOINT_DIR_CHARACTERS)]


class TrainerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer sends to `/register`. `batch_size` counts sequences.

    A `max_token_len` of 0 or less means no limit. With a `num_steps` of -1, each environment uses its own number of
    steps.
    """

    wandb_group: _Name
    wandb_project: _Name
    batch_size: _Size
    max_token_len: _Whole
    checkpoint_dir: _Folder
    save_checkpoint_interval: _Whole
    starting_step: Annotated[int, Meta(ge=0, le=_INT53)]
    num_steps: _Whole


class EnvironmentRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment sends to `/register-env`.

    `min_batch_allocation` is the smallest share of each batch that the environment wants, from 0 to 1.
    """

    max_token_length: _Whole
    desired_name: _Name
    weight: float
    group_size: _Size
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None


class _Named(msgspec.Struct):
    env_id: _Id


_trainers = msgspec.json.Decoder(TrainerRegistration)
_environments = msgspec.json.Decoder(EnvironmentRegistration)
_named = msgspec.json.Decoder(_Named)


def read_trainer(body: bytes) -> TrainerRegistration:
    """Read the registration of a trainer. Raises `UnfitBody`."""
    return decode_at(_trainers, body)


def read_environment(body: bytes) -> EnvironmentRegistration:
    """Read the registration of an environment. Raises `UnfitBody`."""
    return decode_at(_environments, body)


def read_environment_id(body: bytes, query: str | None = None) -> int:
    """Return an environment's id: from the body, or from `env_id` in the query if there is no body.

    Atropos's environments send a body with a GET, which many clients and proxies cannot do. Raises `UnfitBody` for an
    invalid id.
    """
    if body.strip() or query is None:
        return decode_at(_named, body or b"{}").env_id
    return _number("env_id", query, "an environment")


def read_after(query: str | None) -> int | None:
    """Return the number of the last batch that a trainer has, or None if the query does not give it. Raises `UnfitBody`
    for an invalid number."""
    return None if query is None else _number("after", query, "the last batch that you have, or 0")


def _number(name: str, query: str, what: str) -> int:
    if not query.isascii() or not query.isdecimal() or len(query) > 10 or int(query) >= 1 << 31:
        raise UnfitBody(name, f"{name} is {query[:40]!r}, but must be the number of {what}.")
    return int(query)
