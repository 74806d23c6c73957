"""Errors in OpenAI's format, for the APIs that use one of OpenAI's dialects. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from bombus.errors import Code, Refused
from bombus_gateway.call.request import InvalidField
from bombus_gateway.decoding.json_body import BadParameter
from bombus_gateway.limits import in_short

_CODES = {
    Code.BAD_KEY: "invalid_api_key",
    Code.KEY_EXPIRED: "invalid_api_key",
    Code.PROMPT_TOO_LONG: "context_length_exceeded",
    Code.UNKNOWN_MODEL: "model_not_found",
    Code.UNKNOWN_CALL: "previous_response_not_found",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def error_fields(error: Refused, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of OpenAI's error object. `parameters` maps `CompletionRequest` fields to OpenAI's names."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = _CODES.get(error.code, str(error.code))
    param = in_short(_parameter(error, parameters) or "") or None
    return {"message": in_short(error.why), "type": kind, "param": param, "code": code}


def error_body(error: Refused, parameters: Mapping[str, str]) -> bytes:
    """Return an error's body in OpenAI's format."""
    return msgspec.json.encode({"error": error_fields(error, parameters)})


def _parameter(error: Refused, parameters: Mapping[str, str]) -> str | None:
    if isinstance(error, InvalidField):
        return parameters.get(error.field, error.field)
    return error.param or None if isinstance(error, BadParameter) else None
