"""OpenAI's wire format, behind the interfaces in `call/api.py`: reads requests, and writes answers and errors."""

from collections.abc import Callable
from functools import partial

from bombus.errors import Refused
from bombus_gateway.access import HeaderMap
from bombus_gateway.call.api import ParsedRequest
from bombus_gateway.call.prefixes import NOTHING_READ, BodyPrefix
from bombus_gateway.harnesses.marks import marks_of
from bombus_gateway.openai.request import OpenAIRequest
from bombus_gateway.openai.response import OpenAIEncoder, event
from bombus_gateway.openai_errors import error_body

_PARAMETERS = {"stops": "stop"}  # fields of `CompletionRequest` with a different name in OpenAI's API


class OpenAIDialect:
    """The wire format of one route. `read_request` decodes a body; `check_model` raises `Refused` for a wrong model
    name."""

    def __init__(
        self,
        name: bytes,
        read_request: Callable[[bytes, BodyPrefix], OpenAIRequest],
        check_model: Callable[[str], None],
    ) -> None:
        self.name = name
        self._read_request = read_request
        self._check_model = check_model

    def read(self, body: bytes, headers: HeaderMap, before: BodyPrefix = NOTHING_READ) -> ParsedRequest:
        request = self._read_request(body, before)
        self._check_model(request.model)
        marks = marks_of(headers, request.completion)
        encoder = partial(OpenAIEncoder, request)
        return ParsedRequest(request.completion, encoder, marks.role, marks.auxiliary_call, request.prefix)

    def error(self, error: Refused) -> bytes:
        return error_body(error, _PARAMETERS)

    def error_event(self, error: Refused) -> bytes:
        """Return the event that reports an error. No [DONE] follows it, since the answer is incomplete and the SDK must
        raise."""
        return event(error_body(error, _PARAMETERS))
