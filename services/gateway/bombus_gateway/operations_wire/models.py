"""Requests that create or end a model."""

from collections.abc import Callable

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.records import digest
from bombus.operations import AdapterPart, AdapterSpec, CreateModel, EndModel
from bombus_gateway import limits
from bombus_gateway.decoding.json_body import decode_body
from bombus_gateway.operations_wire.dialects import TrainingDialect, is_tinkers, tinker_model
from bombus_gateway.operations_wire.paths import checked_name, read_path
from bombus_gateway.operations_wire.submission import (
    NOT_GIVEN,
    ModelAddress,
    Seed,
    SeqId,
    Submission,
    attempted,
    checked_id,
    is_given,
    submitted,
)

ADAMW = "adamw"
ENDED_S = 30 * 86_400.0  # how long a killed model is kept, the same as for a model whose session has ended


class AdapterDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The server's values for settings that a client leaves out or always sends with its own default.

    Tinker's client never sends an alpha. It asks for an adapter on the unembedding unless its user forbids one. A
    server that cannot offer this adapter does not refuse the request: if `unembedding` is false, that part is left out.
    xorl-client asks for an adapter even if the server trains `full_weights`, and then gets a model without one. It may
    leave out the `base`.
    """

    rank: int = 32
    alpha: float = 32.0
    unembedding: bool = False
    full_weights: bool = False
    base: str = ""


class _Lora(msgspec.Struct):
    rank: int | None = None
    lora_rank: int | None = None
    alpha: float | None = None
    lora_alpha: float | None = None
    seed: Seed | None = None
    dropout: float | None = None
    target_modules: list[str] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(msgspec.Struct):
    type: str = ADAMW


class _Create(msgspec.Struct):
    base_model: str = ""
    lora_config: _Lora | None = None
    optimizer_config: _Optimizer | None = None
    path: str | None = None
    optimizer: bool = False
    weights_access_token: str | None = None


class _TinkerAddress(msgspec.Struct):
    session_id: str
    model_seq_id: SeqId
    user_metadata: msgspec.Raw = NOT_GIVEN


class _End(ModelAddress):
    save_checkpoint: bool = True
    reset_weights: bool = False


_creates = msgspec.json.Decoder(_Create)
_tinker_addresses = msgspec.json.Decoder(_TinkerAddress)
_xorl_addresses = msgspec.json.Decoder(ModelAddress)
_ends = msgspec.json.Decoder(_End)
_metadata = msgspec.json.Decoder(dict[str, str])


def read_create_model(dialect: TrainingDialect, body: bytes, defaults: AdapterDefaults) -> Submission:
    """Read a `create_model` request, which is a model's request number 0. Raises `Refused` if it does not name the
    model."""
    if dialect == TrainingDialect.TINKER:
        return _of_tinker(body, lambda model: _create(dialect, body, defaults, model))
    given = decode_body(_xorl_addresses, body)
    model = _new_xorl_model(given.model)
    return Submission(model=model, seq=0, operation=attempted(lambda: _create(dialect, body, defaults, model)))


def read_create_by_load(body: bytes) -> Submission:
    """Read a `load_weights` request with which Tinker's client creates a model from a checkpoint, with the checkpoint's
    adapter."""
    return _of_tinker(body, lambda _: _from_checkpoint(body))


def read_end_model(body: bytes, save_as: str = "") -> Submission:
    """Read a `kill_session` or an `unload_model` request. For a `kill_session`, the model is saved under `save_as`
    unless the client declines."""
    given = decode_body(_ends, body)
    model = checked_id(given.model, "model_id")
    saved = save_as if given.save_checkpoint else ""
    end = EndModel(save_as=saved, reset_weights=given.reset_weights, ttl_s=ENDED_S if saved else 0.0)
    return Submission(model=model, seq=0, operation=end)


def _of_tinker(body: bytes, make: Callable[[str], CreateModel]) -> Submission:
    given = decode_body(_tinker_addresses, body)
    model = checked_name(tinker_model(given.session_id, given.model_seq_id), "model")
    return submitted(
        model,
        0,
        lambda: Submission(model=model, seq=0, operation=make(model), metadata=kept_metadata(given.user_metadata)),
    )


def kept_metadata(given: msgspec.Raw) -> dict[str, str]:
    """Return the metadata that a client wants kept. Raises `Refused`: TOO_LARGE if there is too much of it, and
    MALFORMED if any of it is not text."""
    if not is_given(given):
        return {}
    if len(given) > limits.USER_METADATA_BYTES:
        why = f"user_metadata has {len(given)} bytes, but the limit is {limits.USER_METADATA_BYTES}."
        raise Refused(Code.TOO_LARGE, why)
    try:
        return _metadata.decode(given)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(Code.MALFORMED, f"user_metadata must map names to strings: {error}.") from None


def _new_xorl_model(model: str) -> str:
    if is_tinkers(model):
        why = f"{model[:140]!r} cannot be the name of a model: only ids of Tinker's clients may contain {':train:'!r}."
        raise Refused(Code.MALFORMED, why)
    return checked_name(model, "model")


def drawn_seed(model: str) -> int:
    """Return a seed, derived from the model's name, for a model whose client gives none.

    Tinker's names contain the random id of a session, so models differ from run to run. A repeated request gets the
    same seed, and is therefore the same operation.
    """
    return int.from_bytes(digest(model.encode())[:4])


def _create(dialect: TrainingDialect, body: bytes, defaults: AdapterDefaults, model: str) -> CreateModel:
    given = decode_body(_creates, body)
    _check_optimizer(given.optimizer_config)
    base = given.base_model or (defaults.base if dialect == TrainingDialect.XORL else "")
    if not base:
        raise Refused(Code.MALFORMED, "base_model is missing: name the model to train.")
    checked_id(base, "base_model")
    if dialect == TrainingDialect.XORL and defaults.full_weights:
        return CreateModel(base=base)
    lora = given.lora_config or _Lora()
    rank = next((each for each in (lora.rank, lora.lora_rank) if each is not None), defaults.rank)
    if rank == 0:  # the only way for Tinker's client to ask for a model without an adapter
        return CreateModel(base=base)
    return CreateModel(base=base, adapter=_adapter(lora, rank, defaults, model))


def _adapter(lora: _Lora, rank: int, defaults: AdapterDefaults, model: str) -> AdapterSpec:
    if not 0 < rank <= limits.ADAPTER_RANK:
        raise Refused(Code.MALFORMED, f"The rank of an adapter must be 1 to {limits.ADAPTER_RANK}, not {rank}.")
    if lora.dropout:
        raise Refused(Code.UNSUPPORTED, f"An adapter's dropout of {lora.dropout} is not offered: leave it at 0.")
    targets = tuple(lora.target_modules or ())
    if len(targets) > limits.ADAPTER_TARGETS or not all(0 < len(each) <= limits.NAME_CHARACTERS for each in targets):
        why = f"target_modules must be at most {limits.ADAPTER_TARGETS} layer names, such as q_proj."
        raise Refused(Code.MALFORMED, why)
    wanted = (
        (AdapterPart.ATTENTION, lora.train_attn),
        (AdapterPart.MLP, lora.train_mlp),
        (AdapterPart.UNEMBEDDING, lora.train_unembed and defaults.unembedding),
    )
    parts = tuple(part for part, is_wanted in wanted if is_wanted)
    if not parts and not targets:
        raise Refused(Code.UNSUPPORTED, "Nothing would be trained: set train_attn or train_mlp of the lora_config.")
    alphas = (lora.alpha, lora.lora_alpha, defaults.alpha)
    alpha = next(each for each in alphas if each is not None)
    seed = drawn_seed(model) if lora.seed is None else lora.seed
    return AdapterSpec(rank=rank, alpha=alpha, seed=seed, parts=parts, targets=targets)


def _from_checkpoint(body: bytes) -> CreateModel:
    given = decode_body(_creates, body)
    _check_optimizer(given.optimizer_config)
    if given.weights_access_token:
        raise Refused(Code.UNSUPPORTED, "weights_access_token is not supported: all checkpoints belong to one account.")
    checkpoint = str(read_path(given.path or ""))
    return CreateModel(base=given.base_model, checkpoint=checkpoint, with_optimizer=given.optimizer)


def _check_optimizer(config: _Optimizer | None) -> None:
    if config is not None and config.type != ADAMW:
        raise Refused(Code.UNSUPPORTED, f"The optimizer {config.type[:40]!r} is not offered: models here use adamw.")
