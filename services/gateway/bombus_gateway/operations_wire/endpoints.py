"""Requests from xorl's client about external inference servers and weight syncs."""

from typing import Annotated

import msgspec
from msgspec import Meta

from bombus.errors import Code, Refused
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.submission import NOT_GIVEN, checked_id, is_given

DEFAULT_POOL = "default"

_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Size = Annotated[int, Meta(ge=1, le=4096)]


class Endpoint(msgspec.Struct, frozen=True):
    """The address of an inference server."""

    host: str
    port: int


class NewEndpoint(msgspec.Struct, frozen=True):
    """An inference server to give weights to. With `sync`, the server gets the current weights immediately."""

    at: Endpoint
    world_size: int
    sync: bool


class SyncRequest(msgspec.Struct, frozen=True):
    """A request to sync `model`, where "" means the default or only model. `label` names the weights on servers; if it
    is "", we choose one."""

    model: str = ""
    label: str = ""


class _Old(msgspec.Struct):
    host: str
    port: _Port


class _New(_Old):
    world_size: _Size = 1
    pool: str = DEFAULT_POOL
    sync_weights: bool = False


class _Sync(msgspec.Struct):
    model_id: str | None = None
    weight_version: str | int | None = None
    quantization: msgspec.Raw = NOT_GIVEN
    pools: list[str] | None = None


_new_endpoints = msgspec.json.Decoder(_New)
_olds = msgspec.json.Decoder(_Old)
_syncs = msgspec.json.Decoder(_Sync)


def read_new_endpoint(body: bytes) -> NewEndpoint:
    """Read a new endpoint. Raises `Refused` if the body is invalid."""
    given = decode_body(_new_endpoints, body)
    _check_pools([given.pool])
    return NewEndpoint(_address(given), given.world_size, given.sync_weights)


def read_endpoint(body: bytes) -> Endpoint:
    """Read the address of an endpoint. Raises `Refused` if the body is invalid."""
    given = decode_body(_olds, body)
    return _address(given)


def read_sync(body: bytes) -> SyncRequest:
    """Read a request for a sync. Fields for NCCL are accepted and ignored. Raises `Refused` if the body is invalid."""
    given = decode_body(_syncs, body or b"{}")
    if is_given(given.quantization):
        raise Refused(Code.UNSUPPORTED, "quantization is not offered: weights are sent as they are served.")
    _check_pools(given.pools or [])
    label = "" if given.weight_version is None else str(given.weight_version)
    if len(label) > limits.NAME_CHARACTERS:
        raise Refused(Code.MALFORMED, f"weight_version must have at most {limits.NAME_CHARACTERS} characters.")
    return SyncRequest(checked_id(given.model_id, "model_id") if given.model_id else "", label)


def _address(given: _Old) -> Endpoint:
    if not 0 < len(given.host) <= limits.NAME_CHARACTERS:
        raise Refused(Code.MALFORMED, f"host must have 1 to {limits.NAME_CHARACTERS} characters.")
    return Endpoint(given.host.lower(), given.port)


def _check_pools(pools: list[str]) -> None:
    for pool in pools:
        if pool != DEFAULT_POOL:
            why = f"There is no pool {pool[:40]!r} here: all endpoints of an engine are in {DEFAULT_POOL!r}."
            raise Refused(Code.UNSUPPORTED, why)
