"""What one request may hold, at every door. docs/operations.md has the table, with what comes before the request.

The operator's own limits are in `settings.py`: the size of a call's body, open calls, bytes for each episode.
"""

from collections.abc import Mapping
from typing import Any

# Model calls.
MESSAGES = 4096
CHOICES = 64
TOOLS = 256
CALLS_IN_MESSAGE = 256
STOPS = 16
STOP_CHARACTERS = 256
NAME_CHARACTERS = 256  # of a model, a participant, a function, the id of a call
ROLE_CHARACTERS = 64  # of the header x-bombus-role
CHARACTERS_FOR_A_TOKEN = 16  # of the model's length; English has four, and lines of spaces or signs the most

# The swarm door.
SWARM_BODY_BYTES = 4 << 20
ID_CHARACTERS = 128
TASK_CHARACTERS = 512
IDEMPOTENCY_KEY_CHARACTERS = 256
EPISODES = 1024
REWARDS = 100_000
WAIT_S = 60.0
METADATA_BYTES = 64 << 10  # of an episode, as the log has it
METRICS = 1024

# Both.
DEPTH = 128  # of lists and objects within each other, in tools, in arguments of calls, in metadata
QUOTED_CHARACTERS = 1000  # of a refusal, which may quote what it refuses


def is_deeper(value: Any, depth: int = DEPTH) -> bool:
    """Whether lists and objects are within each other more than `depth` times."""
    if not isinstance(value, list | Mapping):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return depth == 0 or any(is_deeper(each, depth - 1) for each in inner)


def in_short(why: str) -> str:
    """Return the sentence of a refusal, cut where it quotes too much, with halves of characters spelled out."""
    why = why.encode(errors="backslashreplace").decode()
    return why if len(why) <= QUOTED_CHARACTERS else why[:QUOTED_CHARACTERS] + " ..."
