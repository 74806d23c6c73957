"""A chat message as the gateway stores, compares and renders it, and the ids of the calls in it.

The gateway makes the call ids that clients receive, and includes in each one the id that the model wrote. The model's
own ids are not enough: some models number the calls in each answer from 0, so their ids do not show which answer a
message echoes. In later prompts, the model reads the id that it wrote, both in the call and in the result.
"""

import re
from typing import Any

# Has `role` and text `content`, and optionally `name`, `tool_calls`, `tool_call_id` and `reasoning_content`. A message
# in a request may also have `answer_of` (a model call and the number of a choice), if a call id made by the gateway
# shows that the message is this choice. The field distinguishes equal answers, and is neither stored nor rendered.
ChatMessage = dict[str, Any]

OWN_CHARACTERS_MAX = 64  # the longest id written by the model that is kept

_own = re.compile(rf"[\w.:/-]{{1,{OWN_CHARACTERS_MAX}}}", re.ASCII)
_ours = re.compile(rf"call_[0-9a-f]{{20}}[0-9]+_[0-9]+(?:-({_own.pattern}))?", re.ASCII)


def id_of_call(call: str, choice: int, number: int, own: str) -> str:
    """Return the id of tool call `number` in choice `choice` of model call `call`.

    `own` is the id that the model wrote, or empty. An `own` that is too long or has unusual characters is left out.
    """
    ours = f"call_{call[:20]}{choice}_{number}"
    return f"{ours}-{own}" if _own.fullmatch(own) else ours


def id_for_model(call_id: str) -> str:
    """Return the id that the model wrote, or `call_id` itself if it does not contain one."""
    found = _ours.fullmatch(call_id)
    return found.group(1) or call_id if found else call_id


def is_ours(call_id: str) -> bool:
    """Return whether an id has the form of the ids that the gateway makes."""
    return _ours.fullmatch(call_id) is not None
