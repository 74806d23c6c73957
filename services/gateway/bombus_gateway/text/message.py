"""A chat message as the gateway stores, compares and renders it."""

from typing import Any

# `role` and text `content`; where there are any, `name`, `tool_calls`, `tool_call_id` and `reasoning_content`.
ChatMessage = dict[str, Any]
