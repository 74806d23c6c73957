"""A short digest of a model's prompts. It differs between gateways that would render the prompts differently.

All gateways of a run have the same files and the same job, but different versions of bombus or of a library may render
conversations differently. So the digest includes rendered conversations.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bombus.errors import Refused
from bombus.hive.records import digest
from bombus_gateway.text.forms import TOOL, call_of, user
from bombus_gateway.text.message import ChatMessage
from bombus_gateway.text.renderer import TemplateRenderer

DIGITS = 8

_SYSTEM: ChatMessage = {"role": "system", "content": "Answer in one word."}
_REASONED: ChatMessage = {"role": "assistant", "content": " Yes.\n", "reasoning_content": "One word.\n"}
_RESULT: ChatMessage = {"role": "tool", "tool_call_id": "call_0", "content": '{"found": "réséda, 木犀草"}'}
_CONVERSATIONS: tuple[tuple[Sequence[ChatMessage], Sequence[Mapping[str, Any]]], ...] = (
    ([user("Is it spring?")], []),
    ([_SYSTEM, user("  Is it\n\nspring? "), _REASONED, user("And the résédas, 木犀草?")], []),
    ([user("Look for résédas.")], [TOOL]),
    ([_SYSTEM, user("Look for résédas."), call_of(["réséda"]), _RESULT], [TOOL]),
    ([user("Look for both."), call_of(["réséda", "rose"]), _RESULT, {**_RESULT, "tool_call_id": "call_1"}], [TOOL]),
)


def prompt_digest(renderer: TemplateRenderer, *sources: object) -> str:
    """Return a digest of `sources`, of the prompts of some conversations, and of the tokens that end a completion.

    Each date in a prompt is replaced by its format, so that the digest is the same every day.
    """
    undated = renderer.undated()
    prompts = [_prompt(undated, messages, tools) for messages, tools in _CONVERSATIONS]
    parts = [*sources, prompts, sorted(renderer.stop_token_ids)]
    return digest(json.dumps(parts, sort_keys=True).encode()).hex()[:DIGITS]


def _prompt(
    renderer: TemplateRenderer, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
) -> list[int] | None:
    try:
        return renderer.render(renderer.adapted(messages), tools)
    except Refused:
        return None
