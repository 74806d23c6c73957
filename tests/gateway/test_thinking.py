"""A request for the model's thinking becomes the variables that its chat template reads."""

from collections.abc import Mapping
from typing import Any

import pytest

from bombus.text.chat_template import ChatTemplate, TemplateRefused
from bombus_gateway.text.thinking import RequestedThinking, ThinkingVariables, find_thinking

FIELDS = RequestedThinking(on_field="thinking", effort_field="effort", budget_field="budget")
# How families write it: Qwen3 and GLM, DeepSeek, gpt-oss, Hunyuan, Kimi, MiniMax, Seed-OSS.
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
EITHER = (
    "{% if thinking is not defined %}{% set thinking = enable_thinking if enable_thinking is defined else false %}"
    "{% endif %}{{ '<think>' if thinking else '</think>' }}"
)
EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}{{ reasoning_effort }}"
)
STRICT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('what?') }}{% endif %}"
    "{{ reasoning_effort }}"
)
BOTH = (
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
    "{% if thinking and thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}"
    "{{ raise_exception('what?') }}{% endif %}{% if thinking %}{{ thinking_effort | default('max') }}{% endif %}"
)
MODE = "{% if thinking_mode is defined and thinking_mode == 'disabled' %}</think>{% endif %}"
BUDGET = "{% if thinking_budget is defined and thinking_budget >= 0 %}{{ thinking_budget }}{% endif %}"
OWN = "{% for message in messages %}{% set thinking = message.thinking %}{{ thinking }}{% endfor %}"
ON, OFF = FIELDS._replace(on=True), FIELDS._replace(on=False)


def effort(value: str, usual: str = "medium") -> RequestedThinking:
    return RequestedThinking(on=True, effort=value, usual=usual, effort_field="effort")


def found_in(source: str, thinks: bool = True) -> ThinkingVariables:
    template = ChatTemplate(source, {})

    def render(variables: Mapping[str, Any]) -> str | None:
        try:
            return template.given(variables).render([{"role": "user", "content": "hi"}], [], True)
        except TemplateRefused:
            return None

    return find_thinking(render, template.looked_up(), template.words(), thinks)


@pytest.mark.parametrize(
    ("source", "asked_for", "variables", "left_out"),
    [
        (SWITCH, ON, {"enable_thinking": True}, []),
        (SWITCH, OFF, {"enable_thinking": False}, []),
        (SWITCH, effort("medium"), {"enable_thinking": True}, []),
        (SWITCH, effort("high"), {"enable_thinking": True}, ["effort"]),
        (SWITCH, effort("high", "high"), {"enable_thinking": True}, []),
        (EITHER, ON, {"enable_thinking": True, "thinking": True}, []),
        (EITHER, OFF, {"enable_thinking": False, "thinking": False}, []),
        (EFFORT, effort("low"), {"reasoning_effort": "low"}, []),
        (EFFORT, effort("minimal"), {"reasoning_effort": "low"}, ["effort"]),  # nothing says that it knows the word
        (EFFORT, effort("max"), {"reasoning_effort": "high"}, ["effort"]),
        (EFFORT, ON, {}, []),
        (EFFORT, OFF, {}, ["thinking"]),
        (STRICT, OFF, {"reasoning_effort": "no_think"}, []),
        (STRICT, ON, {"reasoning_effort": "high"}, []),
        (STRICT, effort("high"), {"reasoning_effort": "high"}, []),
        (STRICT, effort("medium"), {"reasoning_effort": "high"}, ["effort"]),
        (BOTH, effort("max"), {"thinking": True, "thinking_effort": "max"}, []),
        (BOTH, OFF, {"thinking": False}, []),
        (MODE, OFF, {"thinking_mode": "disabled"}, []),
        (BUDGET, OFF, {"thinking_budget": 0}, []),
        (BUDGET, ON._replace(budget=512), {"thinking_budget": 512}, []),
        (SWITCH, ON._replace(budget=512), {"enable_thinking": True}, ["budget"]),
        (SWITCH, OFF._replace(effort="high", usual="high"), {"enable_thinking": False}, []),
        (OWN, OFF, {}, ["thinking"]),
    ],
)
def test_a_wish_becomes_what_the_template_reads_and_the_rest_is_named(
    source: str, asked_for: RequestedThinking, variables: dict[str, Any], left_out: list[str]
) -> None:
    assert found_in(source).given(asked_for) == (variables, left_out)


@pytest.mark.parametrize(
    ("asked_for", "left_out"),
    [(ON, ["thinking"]), (OFF, []), (effort("medium"), []), (effort("high"), ["effort"]), (effort("high", "high"), [])],
)
def test_a_model_that_does_not_think_is_only_asked_in_vain_for_what_goes_beyond_the_usual(
    asked_for: RequestedThinking, left_out: list[str]
) -> None:
    assert found_in("{{ messages[0].content }}", thinks=False).given(asked_for) == ({}, left_out)


def test_a_template_that_refuses_a_value_is_not_given_it() -> None:
    picky = "{% if enable_thinking is defined and not enable_thinking %}{{ raise_exception('no') }}{% endif %}"
    assert found_in(picky) == ThinkingVariables(thinks=True)
