"""Parameters shared by several dialects, in the form that is decoded and described in the OpenAPI document."""

from typing import Annotated

from msgspec import Meta

from bombus_gateway import limits

Name = Annotated[str, Meta(max_length=limits.NAME_CHARACTERS)]
ModelName = Annotated[Name, Meta(description="any name; the engine is determined by the key")]
Temperature = Annotated[float, Meta(ge=0, le=2, description="default: the job's")]
TopP = Annotated[
    float,
    Meta(
        ge=0,
        le=1,
        description="below 1 only in eval episodes, unless the job allows it",
        extra_json_schema={"default": 1},
    ),
]
AnswerLength = Annotated[int, Meta(ge=1, description="default and limit: the job's max_response_length_in_one_turn")]
Streamed = Annotated[bool, Meta(extra_json_schema={"default": False})]
