"""The thinking options in requests to Anthropic's Messages API. Pure."""

from typing import Any

from bombus_gateway.call.request import Unsupported
from bombus_gateway.decoding.json_body import unknown_parts
from bombus_gateway.text.thinking import NEAREST, RequestedThinking

_TYPES = {"enabled": True, "disabled": False, "adaptive": None}  # whether to think; None lets the model decide
_USUAL_EFFORT = "high"


def requested_thinking(thinking: Any, output: Any) -> RequestedThinking | None:
    """Return the thinking requested by `thinking` and by the effort in `output_config`, or None if neither requests
    any.

    If thinking is disabled, an effort does not enable it. `display` is ignored, since answers always include the
    thinking.
    """
    thinking, effort = thinking if isinstance(thinking, dict) else {}, _effort(output)
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    on = _TYPES.get(kind) if isinstance(kind, str) else None
    known = effort if isinstance(effort, str) and effort in NEAREST else ""
    if on is None and not known:
        return None
    return RequestedThinking(
        on=on is not False,
        effort=known,
        budget=budget if on and type(budget) is int and budget > 0 else 0,
        usual=_USUAL_EFFORT,
        on_field="" if on is None else "thinking",
        effort_field="output_config.effort",
        budget_field="thinking.budget_tokens",
    )


def beyond_thinking(thinking: Any, output: Any) -> list[Unsupported]:
    """Return the unknown parts and values of these two fields."""
    found = [
        *unknown_parts("thinking", thinking, ("type", "budget_tokens", "display")),
        *unknown_parts("output_config", output, ("effort", "format")),
    ]
    if isinstance(thinking, dict) and thinking.get("type") not in tuple(_TYPES):
        found.append(Unsupported("thinking.type", f"it must be one of {', '.join(_TYPES)}"))
    if _effort(output) not in (None, *NEAREST):
        found.append(Unsupported("output_config.effort", f"it must be one of {', '.join(NEAREST)}"))
    return found


def _effort(output: Any) -> Any:
    return output.get("effort") if isinstance(output, dict) else None
