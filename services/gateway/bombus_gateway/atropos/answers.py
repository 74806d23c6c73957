"""Answers to trainers and environments, except batches and groups, which `batches` writes."""

import msgspec

WAIT_FOR_TRAINER = b'{"status":"wait for trainer to start"}'
DISCONNECTED = b'{"status":"success"}'
RESET = b"Reset successful"  # sent as text/plain
RECEIVED = b'{"status":"received"}'
NOT_REGISTERED = b'{"status":"error","message":"No trainer has registered: call /register first.","batch":[]}'

_encode = msgspec.json.Encoder().encode


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/register-env` once the trainer has asked for its first batch."""

    status: str = "success"
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/status-env`. Queue sizes are counted in groups of this environment's size."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class PushAnswer(msgspec.Struct, frozen=True):
    """The outcome for one group: whether the group is held until its environment has enough sequences, and how many are
    held."""

    is_buffered: bool = False
    held: int = 0  # sequences held for that environment


def write_welcome(engine_running: bool) -> bytes:
    """Return the answer to `/`, with the fields that clients of this API and of inference servers check."""
    return _encode({"message": "AtroposLib API", "status": "healthy", "engine_running": engine_running})


def write_registered(uuid: int) -> bytes:
    """Return the answer to `/register`. The number may have 128 bits."""
    return b'{"uuid":%d}' % uuid


def write_wandb_info(group: str | None = None, project: str | None = None) -> bytes:
    return _encode({"group": group, "project": project})


def write_info(batch_size: int = -1, max_token_len: int = -1) -> bytes:
    """Return the answer to `/info`. A value that no trainer has given yet is -1."""
    return _encode({"batch_size": batch_size, "max_token_len": max_token_len})


def write_status(current_step: int = 0, queue_size: int = 0) -> bytes:
    return _encode({"current_step": current_step, "queue_size": queue_size})


def write_joined(joined: JoinAnswer) -> bytes:
    return _encode(joined)


def write_environment_status(status: StatusAnswer) -> bytes:
    return _encode(status)


def write_disconnect_failed(why: str) -> bytes:
    """Return the answer to `/disconnect-env` for an unknown environment. It is sent with status 200."""
    return _encode({"status": "failure", "error": why})


def write_pushed(result: PushAnswer) -> bytes:
    """Return the answer to `/scored_data`."""
    return _encode({"status": "buffered", "buffer_size": result.held}) if result.is_buffered else RECEIVED


def write_pushed_list(results: list[PushAnswer]) -> bytes:
    """Return the answer to `/scored_data_list`, including the number of buffered groups if there are any."""
    answer: dict[str, object] = {"status": "received", "groups_processed": len(results)}
    buffered = [result.held for result in results if result.is_buffered]
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return _encode(answer)
