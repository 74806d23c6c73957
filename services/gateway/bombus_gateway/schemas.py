"""Builds parts of the OpenAPI document for the routes that are answered outside FastAPI.

The fields of requests come from the structs that decode them. What the structs do not express is added by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from bombus_gateway.limits import NAME_CHARACTERS

JsonSchema = dict[str, Any]
Described = Any  # a schema, or a Python type for which msgspec has a schema

SOME_TEXT = Annotated[str, Meta(min_length=1)]
NAME = Annotated[str, Meta(min_length=1, max_length=NAME_CHARACTERS)]

CHOICES_OF_TOOLS = ("auto", "none", "required")  # strings that OpenAI allows besides objects

BEARER, X_API_KEY = "episode_key", "episode_x_api_key"
_AGENTS_KEYS = {
    BEARER: {"type": "http", "scheme": "bearer"},
    X_API_KEY: {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_REFUSALS = ("400", "401", "403", "404", "405", "413", "503")


def schema_of(described: Described) -> JsonSchema:
    """Return the schema of a type, or a schema given directly, with each `$ref` replaced by its definition."""
    schema: JsonSchema = described if isinstance(described, dict) else msgspec.json.schema(described)
    definitions = schema.get("$defs", {})

    def put_in(part: Any) -> Any:
        if isinstance(part, list):
            return [put_in(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return put_in(definitions[part["$ref"].rpartition("/")[2]])
        return {name: put_in(each) for name, each in part.items() if name != "$defs"}

    return put_in(schema) if definitions else schema


def object_of(*optional: str, **fields: Described) -> JsonSchema:
    """Describe an object with these fields, all required except for the `optional` ones."""
    required = [name for name in fields if name not in optional]
    properties = {name: schema_of(field) for name, field in fields.items()}
    return {"type": "object", "required": required, "properties": properties}


def array_of(items: Described, **more: Any) -> JsonSchema:
    return {"type": "array", "items": schema_of(items), **more}


def any_of(*options: Described) -> JsonSchema:
    return {"anyOf": [*map(schema_of, options)]}


def one_of(*values: str) -> JsonSchema:
    return {"type": "string", "enum": [*values]}


def request_of(kind: type[msgspec.Struct], left_out: Sequence[str] = (), **by_hand: JsonSchema) -> JsonSchema:
    """Describe the object that a struct decodes. `by_hand` adds to the descriptions of fields, and describes fields
    that are decoded elsewhere."""
    fields = [field for field in msgspec.structs.fields(kind) if field.name not in left_out]
    described = by_hand | {field.name: _field(field) | by_hand.get(field.name, {}) for field in fields}
    required = {field.name for field in fields if field.required}
    return object_of(*(name for name in described if name not in required), **described)


def _field(field: msgspec.structs.FieldInfo) -> JsonSchema:
    """Describe a field. The schema does not allow null, which counts as absent."""
    if field.type is msgspec.Raw:
        return {}
    schema = schema_of(field.type)
    default = {} if field.required or field.default is None else {"default": field.default}
    options = [option for option in schema.get("anyOf", [schema]) if option != {"type": "null"}]
    return (options[0] if len(options) == 1 else {"anyOf": options}) | default


# ---- routes -------------------------------------------------------------------------------------------------------


def named(schema: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{schema}"}


def answered(description: str, schema: str, event: JsonSchema | None = None) -> JsonSchema:
    """Describe an answer by the name of its schema. A model call can also be answered with a stream of `event`."""
    content = _json(named(schema))
    if event is None:
        return {"description": description, "content": content}
    content["text/event-stream"] = {"itemSchema": event}
    overridden = {"schema": schema_of(str), "description": "names of what the request asked for and did not get"}
    return {"description": description, "content": content, "headers": {"x-bombus-overridden": overridden}}


def event_of(*names: str) -> JsonSchema:
    """Describe a server-sent event with one of these names, whose data is JSON."""
    return object_of(event=one_of(*names), data={"type": "string", "contentMediaType": "application/json"})


def request_body(schema: JsonSchema) -> JsonSchema:
    return {"required": True, "content": _json(schema)}


def _json(schema: JsonSchema) -> JsonSchema:
    return {"application/json": {"schema": schema}}


class DescribedAPI(NamedTuple):
    """What an API's routes have in common: their tag, their keys (any of which opens them), and the schema of their
    refusals."""

    tag: str
    keys: Sequence[str]
    refusal: JsonSchema

    def route(
        self, summary: str, answer: JsonSchema | None, body: JsonSchema | None = None, place: str = ""
    ) -> JsonSchema:
        """Describe a route. `place` is the name of the variable in its path, if any.

        `answer` describes the successful response, and is None if the route refuses every request.
        """
        responses = {**({} if answer is None else {"200": answer}), **dict.fromkeys(_REFUSALS, self.refusal)}
        found: JsonSchema = {"tags": [self.tag], "summary": summary, "responses": responses}
        found["security"] = [{key: []} for key in self.keys]
        if body is not None:
            found["requestBody"] = request_body(body)
        if place:
            found["parameters"] = [{"name": place, "in": "path", "required": True, "schema": schema_of(SOME_TEXT)}]
        return found


def add_routes(
    document: JsonSchema, prefixes: Sequence[str], routes: Mapping[str, JsonSchema], **schemas: JsonSchema
) -> None:
    """Add schemas, and routes by path, to an OpenAPI document. The routes are added under each prefix."""
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components.setdefault("securitySchemes", {}).update(_AGENTS_KEYS)
    paths = document.setdefault("paths", {})
    for prefix in prefixes:
        paths.update({f"{prefix}{path}": described for path, described in routes.items()})
