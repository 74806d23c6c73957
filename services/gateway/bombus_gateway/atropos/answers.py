"""Answers to trainers and environments. `batches` writes the answers that contain batches and groups."""

from collections.abc import Sequence

import msgspec

from bombus.hive.trajectories.queue_status import EnvironmentQueueStatus

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


def write_environment_status(status: EnvironmentQueueStatus) -> bytes:
    return _encode(status)


def write_disconnect_failed(why: str) -> bytes:
    """Return the answer to `/disconnect-env` for an unknown environment. It is sent with status 200."""
    return _encode({"status": "failure", "error": why})


def write_pushed(held: int | None) -> bytes:
    """Return the answer to `/scored_data`. It says whether the group is held until its environment has enough
    sequences, and if so, how many sequences are held."""
    return RECEIVED if held is None else _encode({"status": "buffered", "buffer_size": held})


def write_pushed_list(held: Sequence[int | None]) -> bytes:
    """Return the answer to `/scored_data_list`, including the number of buffered groups if any are buffered."""
    answer: dict[str, object] = {"status": "received", "groups_processed": len(held)}
    buffered = [each for each in held if each is not None]
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return _encode(answer)
