"""What a model may write as the arguments of a step at an environment server elsewhere."""

import pytest

from bombus.environments.kinds import ToolCall
from bombus.environments.pools.remote import arguments_of
from bombus.environments.pools.session import StepRefused


def test_the_arguments_of_a_step_are_a_json_object() -> None:
    assert arguments_of(ToolCall(id="1", name="step", arguments='{"number": 5}')) == {"number": 5}


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{", '{"a": NaN}', '{"a": "\ud800"}', '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"],
    ids=["empty", "list", "cut", "nan", "surrogate", "deep"],
)
def test_other_arguments_are_refused_in_words(text: str) -> None:
    with pytest.raises(StepRefused, match="not a JSON object"):
        arguments_of(ToolCall(id="1", name="step", arguments=text))
