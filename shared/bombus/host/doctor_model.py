"""Checks whether engine and trainer compute a model's architecture, on a tiny model of the same architecture."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bombus.cli import NotInstalled, load
from bombus.errors import EngineFault
from bombus.host.doctor import Finding, State, check
from bombus.weights.models import resolve_model

TRIAL_TOKENS = 256  # far beyond the windows of a tiny model
CHECKS = {
    "served": ("bombus_inference.backends.torch.backend", "inference"),
    "trained": ("bombus_trainer.loading", "trainer"),
}
SHORTER = "set rollout.max_model_len lower, or use a model with a longer context"
CURE = "use a model of a family in docs/models.md, or vLLM for the replicas and verl for the trainer"


def examine_model(name: str, tokens: int | None = None) -> Iterator[Finding]:
    """Check the model `name`, for sequences of `tokens`; up to its context if that is None.

    Its weights are not read: what a family computes does not depend on them.
    """
    what = f"model {name}"
    try:
        probing, miniatures = (load(f"bombus.architectures.{part}", "trainer") for part in ("probing", "miniatures"))
        config = probing.config_of(resolve_model(name))
    except (EngineFault, NotInstalled) as error:
        yield check(what, False, str(error), "name its folder, or download it to this machine")
        return
    try:
        context = probing.context_of(config)
        yield check(f"{what}: context", tokens is None or tokens <= context, _context(context, tokens), SHORTER)
        with probing.refusing(config, "used"):
            probing.check_positions(config, min(tokens or context, context))
    except EngineFault as fault:
        yield check(f"{what}: positions", False, str(fault), SHORTER)
    try:
        small = miniatures.miniature(config)
    except EngineFault as fault:
        todo = "the trainer and the replicas check it when they load it"
        yield check(f"{what}: architecture", False, str(fault), todo, needed=False)
        return
    with tempfile.TemporaryDirectory() as place:
        small.save_pretrained(place)
        for done, (module, extra) in CHECKS.items():
            yield _tried(f"{what}: {done}", config.model_type, Path(place), module, extra)


def _context(context: int, tokens: int | None) -> str:
    return f"{context} tokens" if tokens is None else f"{context} tokens, and sequences may have {tokens}"


def _tried(what: str, architecture: str, folder: Path, module: str, extra: str) -> Finding:
    try:
        load(module, extra).check_model(folder, TRIAL_TOKENS)
    except (EngineFault, NotInstalled) as error:
        return check(what, False, str(error), CURE)
    return Finding(what, State.OK, f"{architecture} is computed as transformers computes it")
