"""A chat message as the gateway stores, compares and renders it, and the ids of the calls in it.

Each id that goes out is ours, and holds what the model wrote as the id of its call: some models number the calls of
each answer from 0, so their ids do not tell which answer a message echoes. What the model reads later, in its call and
in the result of it, is its own id all the same.
"""

import re
from typing import Any

# `role` and text `content`; where there are any, `name`, `tool_calls`, `tool_call_id` and `reasoning_content`.
# In a request also `answer_of`, a call and the number of its choice, where an id of ours says that the message is that
# answer: it tells equal answers apart, and is neither stored nor rendered.
ChatMessage = dict[str, Any]

OWN_CHARACTERS_MAX = 64  # of an id that the model wrote

_own = re.compile(rf"[\w.:/-]{{1,{OWN_CHARACTERS_MAX}}}", re.ASCII)
_ours = re.compile(rf"call_[0-9a-f]{{20}}[0-9]+_[0-9]+(?:-({_own.pattern}))?", re.ASCII)


def id_of_call(call: str, choice: int, number: int, own: str) -> str:
    """Return the id of tool call `number` of a choice of a model call, for which the model wrote `own`, or nothing.

    An own id that is too long, or has other characters than ids have, is left out.
    """
    ours = f"call_{call[:20]}{choice}_{number}"
    return f"{ours}-{own}" if _own.fullmatch(own) else ours


def id_for_model(call_id: str) -> str:
    """Return the id that the model wrote, or the id itself where it is not ours or the model wrote none."""
    found = _ours.fullmatch(call_id)
    return found.group(1) or call_id if found else call_id


def is_ours(call_id: str) -> bool:
    """Return whether an id has the form of those that go out."""
    return _ours.fullmatch(call_id) is not None
