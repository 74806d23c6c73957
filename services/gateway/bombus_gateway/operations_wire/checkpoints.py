"""Requests to save a model and to load a checkpoint into a model."""

import msgspec

from bombus.errors import Code, Refused
from bombus.operations import CheckpointKind, LoadWeights, SaveWeights
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.dialects import TrainingDialect, sampling_session, session_of
from bombus_gateway.operations_wire.models import kept_metadata
from bombus_gateway.operations_wire.paths import CheckpointPath, checked_name, read_loaded_path, read_path
from bombus_gateway.operations_wire.submission import NOT_GIVEN, SeqId, Submission, addressed, attempted, submitted

INFLIGHT, SNAPSHOT = "inflight", "snapshot"
UNNAMED_SAMPLE = "sample-"  # name prefix of a checkpoint that was saved to begin a sampling session
INFLIGHT_SAMPLE = "inflight-"  # the same for a session that moves on to later saves of this kind
UNNAMED_S = 86_400.0  # default lifetime of such checkpoints, short because loops save one in each step
TTL_S_MAX = 10 * 365 * 86_400  # ten years, the longest lifetime that Tinker's client documents


class _Save(msgspec.Struct):
    path: str | None = None
    name: str | None = None
    overwrite: bool | None = None
    ttl_seconds: float | None = None
    save_optimizer: bool = True
    age_encryption_recipients: list[str] | None = None


class _Sampler(msgspec.Struct):
    sampling_session_seq_id: SeqId | None = None
    kind: str = SNAPSHOT
    user_metadata: msgspec.Raw = NOT_GIVEN


class _Load(msgspec.Struct):
    path: str
    optimizer: bool | None = None
    load_optimizer: bool | None = None
    weights_access_token: str | None = None


class _Info(msgspec.Struct):
    tinker_path: str | None = None
    xorl_path: str | None = None


_saves = msgspec.json.Decoder(_Save)
_samplers = msgspec.json.Decoder(_Sampler)
_loads = msgspec.json.Decoder(_Load)
_infos = msgspec.json.Decoder(_Info)


def read_save(dialect: TrainingDialect, kind: CheckpointKind, body: bytes) -> Submission:
    """Read a request to save a model as a checkpoint of this kind. If the request gives no name, the trainer chooses
    one.

    A Tinker client's existing checkpoint is replaced only if the client asks for it. xorl's clients cannot ask for it
    and reuse the same name, so their checkpoints are always replaced. A checkpoint that begins a sampling session is
    named after the session's number.
    """
    model, seq = addressed(dialect, body)
    return submitted(model, seq, lambda: _saved(dialect, kind, body, (model, seq)))


def read_load(dialect: TrainingDialect, body: bytes) -> Submission:
    """Read a request to load a checkpoint into an existing model. For a new model, use `read_create_by_load`."""
    model, seq = addressed(dialect, body)
    return Submission(model=model, seq=seq, operation=attempted(lambda: _load(body, model)))


def checked_ttl(ttl_seconds: float | None) -> float:
    """Return for how many seconds a checkpoint is kept, where 0 means forever. Raises `Refused` MALFORMED if the time
    is out of range."""
    if ttl_seconds is not None and not 0 < ttl_seconds <= TTL_S_MAX:
        why = f"ttl_seconds is {ttl_seconds}, but must be above 0 and at most {TTL_S_MAX}; null keeps it forever."
        raise Refused(Code.MALFORMED, why)
    return ttl_seconds or 0.0


def read_weights_info(body: bytes) -> CheckpointPath:
    """Return the checkpoint that a `weights_info` request names. Raises `Refused` if the path does not name a
    checkpoint."""
    given = decode_body(_infos, body)
    return read_path(given.tinker_path or given.xorl_path or "")


def _saved(dialect: TrainingDialect, kind: CheckpointKind, body: bytes, of: tuple[str, int]) -> Submission:
    model, seq = of
    given = decode_body(_samplers, body)
    session, unnamed, number = "", "", given.sampling_session_seq_id
    if dialect == TrainingDialect.TINKER and kind == CheckpointKind.SAMPLER and number is not None:
        session, unnamed = (
            sampling_session(session_of(model), number),
            f"{INFLIGHT_SAMPLE if given.kind == INFLIGHT else UNNAMED_SAMPLE}{number}",
        )
    operation = _save(dialect, kind, body, unnamed)
    if session and not operation.ttl_s:
        operation = msgspec.structs.replace(operation, ttl_s=UNNAMED_S)
    return Submission(
        model=model,
        seq=seq,
        operation=operation,
        metadata=kept_metadata(given.user_metadata),
        sampling_session=session,
        inflight=given.kind == INFLIGHT,
    )


def _save(dialect: TrainingDialect, kind: CheckpointKind, body: bytes, unnamed: str) -> SaveWeights:
    given = decode_body(_saves, body)
    if given.age_encryption_recipients:
        raise Refused(Code.UNSUPPORTED, "Checkpoints are not encrypted here: leave age_encryption_recipients out.")
    if not given.save_optimizer:
        raise Refused(
            Code.UNSUPPORTED, "save_optimizer cannot be false here: save_weights_for_sampler saves only weights."
        )
    ttl_s = checked_ttl(given.ttl_seconds)
    name = given.path or given.name or unnamed
    if name:
        checked_name(name, "checkpoint")
    overwrite = dialect == TrainingDialect.XORL if given.overwrite is None else given.overwrite
    return SaveWeights(checkpoint=kind, name=name, overwrite=overwrite, ttl_s=ttl_s)


def _load(body: bytes, model: str) -> LoadWeights:
    given = decode_body(_loads, body)
    if given.weights_access_token:
        raise Refused(Code.UNSUPPORTED, "weights_access_token is not supported: all checkpoints belong to one account.")
    optimizer = given.load_optimizer if given.optimizer is None else given.optimizer
    return LoadWeights(checkpoint=str(read_loaded_path(given.path, model)), with_optimizer=bool(optimizer))
