"""The limits of a single request, for every API. docs/limits.md lists these, along with the limits on connections and
headers.

The limits that the operator sets are in `settings.py`: the size of a call's body, open calls, bytes per episode. The
limits for a client key are in `bombus.machine.hive_keys`.
"""

from typing import Any

from bombus.hive.inbox import DEPTH_MAX

SMALL_BODY_BYTES = 256 << 10  # for routes that accept no data, in any API
SIGN_BODY_BYTES = 8 << 10  # for health checks and heartbeats, which a gateway accepts however full it is

# Model calls.
MESSAGES = 4096
CHOICES = 64
FIELDS = 256  # fields in a body, known and unknown
UNSUPPORTED = 4096  # places in a request that ask for something unsupported
TOOLS = 256
CALLS_IN_ANSWER = 256  # if the model writes more calls, the rest is text
CALLS_IN_MESSAGE = 16 * CALLS_IN_ANSWER  # in a request, as some harnesses merge several answers into one message
STOPS = 16
STOP_CHARACTERS = 256
NAME_CHARACTERS = 256  # for the name of a model, participant or function, and for the id of a call
ROLE_CHARACTERS = 64  # in the header x-bombus-role
SAMPLED_TOKENS = 8 << 20  # tokens that one request may ask for, over all of its answers or samples
TOP_LOGPROBS = 20  # alternatives reported per token
SAMPLED_ALTERNATIVES = 2 << 20  # over all of a request's sampled tokens, or over a prompt
TOTAL_TOKENS_DIGITS = 9  # in the header x-bombus-total-tokens
OVERRIDDEN = 32  # names of requested parameters or features that are reported as not applied
CHARACTERS_FOR_A_TOKEN = 16  # per token of context; English has about four, runs of spaces or symbols the most

# The swarm API.
SWARM_BODY_BYTES = 4 << 20
SWARM_DEPTH = 900  # deepest nesting accepted in a report; values nested deeper than `DEPTH` are left out
ID_CHARACTERS = 128
TASK_CHARACTERS = 512
DATA_SET_CHARACTERS = 128
IDEMPOTENCY_KEY_CHARACTERS = 256
MULTI_MODEL_ENGINES = 8  # engines of one multi-model episode
EPISODES = 1024
REWARDS = 100_000
WAIT_S = 60.0
SAMPLER_CHARACTERS = 300  # in the path of a saved model

# Training operations.
TRAINING_BODY_BYTES = 32 << 20  # applies both before and after decompression
TRAINING_NUMBERS = 8 << 20  # tokens and numbers in all arrays of one request
TRAINING_FIELDS = 1 << 18  # fields in protobuf; names or lists in JSON
DATA = 4096  # sequences in one request
LOSS_INPUTS = 32  # arrays per sequence
LOSS_SETTINGS = 64
LOSS_TEXT_CHARACTERS = 1024  # for a loss setting that is a string
SAMPLES = 256  # samples of one prompt
TRAINING_ID_CHARACTERS = 256  # for the id of a model, session or request, and for a path
ADAPTER_RANK = 4096
USER_METADATA_BYTES = 4 << 10  # for a model or a checkpoint, as JSON
ADAPTER_TARGETS = 64

# Rollout groups.
TRAJECTORY_BODY_BYTES = 64 << 20  # applies both before and after decompression
TRAJECTORY_NUMBERS = 8 << 20  # tokens and numbers in all arrays of one request
SEQUENCE_NUMBERS = 1 << 20  # tokens in one sequence, or numbers in an array that accompanies them
TRAJECTORY_LISTS = 1 << 20  # lists and objects; a teacher's candidates take one list per token
TRAJECTORY_GROUPS = 1024  # groups in one request
GROUP_SEQUENCES = 1 << 14  # sequences in a group, and in a batch
ENVIRONMENT_CHARACTERS = 256  # for the name of an environment, a project or a group of runs
CHECKPOINT_DIR_CHARACTERS = 4096
GZIP_MEMBERS = 4096

# All APIs.
DEPTH = DEPTH_MAX  # nested lists and objects, in tools, arguments of calls and metadata
QUOTED_CHARACTERS = 1000  # maximum length of a refusal, which may quote what it refuses


def is_deeper(value: Any, depth: int = DEPTH) -> bool:
    """Return whether lists and objects are nested more than `depth` levels deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deeper(each, depth - 1) for each in inner)


def in_short(why: str) -> str:
    """Return the text of a refusal, truncated to `QUOTED_CHARACTERS`, with lone surrogates escaped."""
    why = why.encode(errors="backslashreplace").decode()
    return why if len(why) <= QUOTED_CHARACTERS else why[:QUOTED_CHARACTERS] + " ..."
