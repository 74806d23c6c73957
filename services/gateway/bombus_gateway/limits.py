"""What one request may hold, in every API. docs/limits.md has the table, with what comes before the request.

The operator's own limits are in `settings.py`: the size of a call's body, open calls, bytes for each episode. What one
client key may have is in `bombus.machine.hive_keys`.
"""

from typing import Any

from bombus.hive.inbox import DEPTH_MAX

SMALL_BODY_BYTES = 256 << 10  # of routes that take no data, whichever API they are of
SIGN_BODY_BYTES = 8 << 10  # of signs of life, which a gateway takes however full it is

# Model calls.
MESSAGES = 4096
CHOICES = 64
FIELDS = 256  # of a body, known and unknown ones
UNSUPPORTED = 4096  # places of a request that ask for what nobody here can do
TOOLS = 256
CALLS_IN_ANSWER = 256  # what the model writes beyond them is text
CALLS_IN_MESSAGE = 16 * CALLS_IN_ANSWER  # of a request: some harnesses make one message of several answers
STOPS = 16
STOP_CHARACTERS = 256
NAME_CHARACTERS = 256  # of a model, a participant, a function, the id of a call
ROLE_CHARACTERS = 64  # of the header x-bombus-role
SAMPLED_TOKENS = 8 << 20  # of all answers to one request, as many as it allows; of samples too
TOP_LOGPROBS = 20  # alternatives to report for one token
SAMPLED_ALTERNATIVES = 2 << 20  # of all of these tokens, or of a prompt
TOTAL_TOKENS_DIGITS = 9  # of the header x-bombus-total-tokens
OVERRIDDEN = 32  # names of what was asked for and is not done
CHARACTERS_FOR_A_TOKEN = 16  # of the model's length; English has four, and lines of spaces or signs the most

# The swarm API.
SWARM_BODY_BYTES = 4 << 20
SWARM_DEPTH = 900  # what is deeper than `DEPTH` in a report is left out, and the rest is taken
ID_CHARACTERS = 128
TASK_CHARACTERS = 512
DATA_SET_CHARACTERS = 128
IDEMPOTENCY_KEY_CHARACTERS = 256
MULTI_MODEL_ENGINES = 8  # of one multi-model episode
EPISODES = 1024
REWARDS = 100_000
WAIT_S = 60.0
SAMPLER_CHARACTERS = 300  # of the path of a saved model

# Training operations.
TRAINING_BODY_BYTES = 32 << 20  # after it was decompressed, too
TRAINING_NUMBERS = 8 << 20  # tokens and numbers of all arrays of one request
TRAINING_FIELDS = 1 << 18  # fields of protobuf; names, or lists, of JSON
DATA = 4096  # sequences of one request
LOSS_INPUTS = 32  # arrays of one sequence
LOSS_SETTINGS = 64
LOSS_TEXT_CHARACTERS = 1024  # of a setting of a loss that is a text
SAMPLES = 256  # of one prompt
TRAINING_ID_CHARACTERS = 256  # of a model, a session, a request, a path
ADAPTER_RANK = 4096
USER_METADATA_BYTES = 4 << 10  # of a model, or of a checkpoint, as JSON
ADAPTER_TARGETS = 64

# Rollout groups.
TRAJECTORY_BODY_BYTES = 64 << 20  # after it was decompressed, too
TRAJECTORY_NUMBERS = 8 << 20  # tokens and numbers of all arrays of one request
SEQUENCE_NUMBERS = 1 << 20  # tokens of one sequence of them, or what stands beside these
TRAJECTORY_LISTS = 1 << 20  # and objects; a teacher's candidates are a list for each token
TRAJECTORY_GROUPS = 1024  # of one request
GROUP_SEQUENCES = 1 << 14  # of a group, and of a batch
ENVIRONMENT_CHARACTERS = 256  # of the name of an environment, a project, a group of runs
CHECKPOINT_DIR_CHARACTERS = 4096
GZIP_MEMBERS = 4096

# All.
DEPTH = DEPTH_MAX  # of lists and objects within each other, in tools, in arguments of calls, in metadata
QUOTED_CHARACTERS = 1000  # of a refusal, which may quote what it refuses


def is_deeper(value: Any, depth: int = DEPTH) -> bool:
    """Return whether lists and objects are within each other more than `depth` times."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deeper(each, depth - 1) for each in inner)


def in_short(why: str) -> str:
    """Return the sentence of a refusal, cut where it quotes too much, with halves of characters spelled out."""
    why = why.encode(errors="backslashreplace").decode()
    return why if len(why) <= QUOTED_CHARACTERS else why[:QUOTED_CHARACTERS] + " ..."
