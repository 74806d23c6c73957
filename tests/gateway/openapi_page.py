"""The OpenAPI page of a gateway as tests read it: they say of each answer whether it is one that the page describes."""

from typing import Any

import httpx
import jsonschema_rs


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a page by which answers have no fields but those that it names. Requests and events stay as they are."""
    paths = {
        path: {method: {**route, "responses": _closed(route["responses"])} for method, route in routes.items()}
        for path, routes in document["paths"].items()
    }
    components = document["components"]
    return {**document, "paths": paths, "components": {**components, "schemas": _closed(components["schemas"])}}


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    found = {name: each if name == "itemSchema" else _closed(each) for name, each in part.items()}
    return {"additionalProperties": False, **found} if "properties" in found else found


class DescribedAnswers:
    """What a page says of the answers to its routes."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = closed(document)

    def check(self, route: str, reply: httpx.Response) -> None:
        """Raise `AssertionError` when the page describes no such answer at a route, `ValidationError` for its body."""
        described = self._document["paths"][route][reply.request.method.lower()]["responses"]
        assert str(reply.status_code) in described, f"{route}: {reply.status_code} {reply.text}"
        content = described[str(reply.status_code)]["content"]
        kind = reply.headers["content-type"].partition(";")[0]
        assert kind in content, f"{route}: {kind}"
        described_as = content[kind].get("schema") or content[kind]["itemSchema"]
        validator = jsonschema_rs.validator_for({**described_as, "components": self._document["components"]})
        for answer in events_of(reply.text) if kind == "text/event-stream" else [reply.json()]:
            validator.validate(answer)


def events_of(stream: str) -> list[dict[str, str]]:
    """Return the events of a stream, each with its fields."""
    blocks = stream.removesuffix("\n\n").split("\n\n")
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
