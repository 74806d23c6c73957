"""Checks the adapter that a client asks for."""

from bombus.errors import Code, EngineFault, Refused
from bombus.operations import AdapterPart, AdapterSpec
from bombus_trainer.backends.torch.base import Base

SEED_MIN, SEED_MAX = -(1 << 63), (1 << 63) - 1


def check_adapter(base: Base, spec: AdapterSpec | None, rank_max: int) -> None:
    """Raise `Refused` if an adapter cannot be created on this base. A `spec` of None, meaning all weights, is always
    accepted."""
    if spec is None:
        return
    if not 1 <= spec.rank <= rank_max:
        raise Refused(Code.BAD_CONFIG, f"the rank of an adapter is {spec.rank}: it must be 1 to {rank_max}")
    if not 0.0 < spec.alpha < 1e6:
        raise Refused(Code.BAD_CONFIG, f"the alpha of an adapter is {spec.alpha}: it must be above 0 and below 1e6")
    if not SEED_MIN <= spec.seed <= SEED_MAX:
        raise Refused(Code.BAD_CONFIG, f"the seed of an adapter is {spec.seed}: it must be a 64-bit integer")
    if AdapterPart.UNEMBEDDING in spec.parts and not spec.targets:
        raise Refused(
            Code.UNSUPPORTED,
            "an adapter on the output layer (unembedding) is not trained here, because the engines do not serve one: "
            "leave unembedding out of its parts",
        )
    try:
        layers = base.layers(spec)
    except EngineFault as error:
        every = not spec.targets and AdapterPart.MLP in spec.parts
        hint = ". Leave mlp out of the adapter's parts, or give its targets" if every else ""
        raise Refused(Code.BAD_CONFIG, f"no adapter like this can be made here: {error}{hint}") from error
    if not layers:
        raise Refused(Code.BAD_CONFIG, f"this model has no layers of the parts {', '.join(spec.parts)} to adapt")
