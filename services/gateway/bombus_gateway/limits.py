"""The limits of a single request, for every API. docs/limits.md lists them, and those of connections and headers.

The limits that the operator sets are in `settings.py`: the size of a call's body, open calls, bytes per episode. The
caps of a client key are in `bombus.machine.hive_keys`.
"""

from typing import Any

from bombus.hive.inbox import DEPTH_MAX

SMALL_BODY_BYTES = 256 << 10  # of routes that accept no data, in any API
SIGN_BODY_BYTES = 8 << 10  # of health checks and heartbeats, which a gateway accepts however full it is

# Model calls.
MESSAGES = 4096
CHOICES = 64
FIELDS = 256  # of a body, known and unknown
UNSUPPORTED = 4096  # places of a request that ask for something unsupported
TOOLS = 256
CALLS_IN_ANSWER = 256  # any more that the model writes are text
CALLS_IN_MESSAGE = 16 * CALLS_IN_ANSWER  # of a request: some harnesses merge several answers into one message
STOPS = 16
STOP_CHARACTERS = 256
NAME_CHARACTERS = 256  # of a model, a participant, a function, the id of a call
ROLE_CHARACTERS = 64  # of the header x-bombus-role
SAMPLED_TOKENS = 8 << 20  # that one request allows for all of its answers; for samples too
TOP_LOGPROBS = 20  # alternatives to report for one token
SAMPLED_ALTERNATIVES = 2 << 20  # over all sampled tokens of a request, or over a prompt
TOTAL_TOKENS_DIGITS = 9  # of the header x-bombus-total-tokens
OVERRIDDEN = 32  # names of requested parameters or features that are not applied
CHARACTERS_FOR_A_TOKEN = 16  # of the model's length; English has about four, runs of spaces or symbols the most

# The swarm API.
SWARM_BODY_BYTES = 4 << 20
SWARM_DEPTH = 900  # values nested deeper than `DEPTH` in a report are left out, and the rest is accepted
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
TRAINING_BODY_BYTES = 32 << 20  # compressed, and decompressed
TRAINING_NUMBERS = 8 << 20  # tokens and numbers of all arrays of one request
TRAINING_FIELDS = 1 << 18  # fields in protobuf; names, or lists, in JSON
DATA = 4096  # sequences of one request
LOSS_INPUTS = 32  # arrays of one sequence
LOSS_SETTINGS = 64
LOSS_TEXT_CHARACTERS = 1024  # of a loss setting that is a string
SAMPLES = 256  # of one prompt
TRAINING_ID_CHARACTERS = 256  # of a model, a session, a request, a path
ADAPTER_RANK = 4096
USER_METADATA_BYTES = 4 << 10  # of a model, or of a checkpoint, as JSON
ADAPTER_TARGETS = 64

# Rollout groups.
TRAJECTORY_BODY_BYTES = 64 << 20  # compressed, and decompressed
TRAJECTORY_NUMBERS = 8 << 20  # tokens and numbers of all arrays of one request
SEQUENCE_NUMBERS = 1 << 20  # tokens of one sequence, or numbers of an array that accompanies them
TRAJECTORY_LISTS = 1 << 20  # lists and objects; a teacher's candidates are a list for each token
TRAJECTORY_GROUPS = 1024  # of one request
GROUP_SEQUENCES = 1 << 14  # of a group, and of a batch
ENVIRONMENT_CHARACTERS = 256  # of the name of an environment, a project or a group of runs
CHECKPOINT_DIR_CHARACTERS = 4096
GZIP_MEMBERS = 4096

# All.
DEPTH = DEPTH_MAX  # of nested lists and objects, in tools, in arguments of calls, in metadata
QUOTED_CHARACTERS = 1000  # of a refusal, which may quote what it refuses


def is_deeper(value: Any, depth: int = DEPTH) -> bool:
    """Return whether lists and objects are nested more than `depth` deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deeper(each, depth - 1) for each in inner)


def in_short(why: str) -> str:
    """Return the text of a refusal, truncated to `QUOTED_CHARACTERS`, with lone surrogates escaped."""
    why = why.encode(errors="backslashreplace").decode()
    return why if len(why) <= QUOTED_CHARACTERS else why[:QUOTED_CHARACTERS] + " ..."
