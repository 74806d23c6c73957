"""The two dialects of training clients, and how to tell which dialect a request is in."""

from collections.abc import Container
from enum import StrEnum

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
OF_TINKER = ":train:"  # only in model ids made by Tinker's client

OF_SAMPLE = ":sample:"  # in the ids of sampling sessions


class TrainingDialect(StrEnum):
    """The kind of client that sent a request. The value is also the scheme of that client's paths."""

    TINKER = "tinker"
    XORL = "xorl"


# By route: fields that only Tinker's client sends. A body with any of them is Tinker's; any other body is xorl's.
_SIGNS = {
    "create_model": ("model_seq_id",),
    "retrieve_future": ("allow_metadata_only",),
    "create_session": ("sdk_version",),
    "create_sampling_session": ("sampling_session_seq_id",),
    "save_weights_for_sampler": ("path", "sampling_session_seq_id"),
    "load_weights": ("model_seq_id",),
    "weights_info": ("tinker_path",),
}
_ALWAYS_TINKER = ("client/config", "client/dynamic_config", "asample", "telemetry", "get_info", "save_weights_external")
_ALWAYS_XORL = ("forward", "abort_gradient_epoch", "kill_session", "list_checkpoints", "delete_checkpoint")


def dialect_of(path: str, content_type: str, fields: Container[str], model: str = "") -> TrainingDialect:
    """Return the dialect of a request, from its path below `/api/v1/`, its content type, the names in its JSON body,
    and its model.

    If the model's id has the form that Tinker's client makes, nothing else matters, since a model's dialect determines
    how its gradient is reduced.
    """
    route = path.rpartition("/api/v1/")[2].strip("/")
    if is_tinkers(model) or route in _ALWAYS_TINKER:
        return TrainingDialect.TINKER
    if route == "forward_backward":
        is_tinker = is_protobuf(content_type)
    elif route in _ALWAYS_XORL:
        is_tinker = False
    else:
        is_tinker = any(sign in fields for sign in _SIGNS.get(route, ()))
    return TrainingDialect.TINKER if is_tinker else TrainingDialect.XORL


def is_protobuf(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == PROTOBUF


def is_tinkers(model: str) -> bool:
    """Return whether a model's id has the form that Tinker's client makes. xorl's clients may not use such an id."""
    return OF_TINKER in model


def tinker_model(session: str, number: int) -> str:
    """Return the id of a session's model, by the formula that Tinker's client relies on."""
    return f"{session}{OF_TINKER}{number}"


def session_of(model: str) -> str:
    """Return the session of a model that Tinker's client made."""
    return model.rpartition(OF_TINKER)[0]


def sampling_session(session: str, number: int) -> str:
    return f"{session}{OF_SAMPLE}{number}"
