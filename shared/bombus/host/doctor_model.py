"""Checks whether engine and trainer compute a model's architecture, on a tiny model of the same architecture."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bombus.cli import NotInstalled, load
from bombus.errors import EngineFault
from bombus.host.doctor import Finding, State, check
from bombus.weights.models import load_config, resolve_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TRIAL_TOKENS = 256  # far beyond the windows of a tiny model
CHECKS = {
    "served": ("bombus_inference.backends.torch.backend", "inference"),
    "trained": ("bombus_trainer.loading", "trainer"),
}
SHORTER = "set rollout.max_model_len lower, or use a model with a longer context"
ELSEWHERE = "name its folder, or download it to this machine"
CURE = (
    "use a model of a family that docs/models.md lists as computed; the vllm backend of the replicas and "
    "trainer.backend verl take some others, which they check themselves"
)
AT_LOAD = "the trainer and the replicas check it when they load it"


def examine_model(name: str, tokens: int | None = None) -> Iterator[Finding]:
    """Check the model `name`, for sequences of `tokens`; up to its context if that is None.

    Its weights are not read: what a family computes does not depend on them.
    """
    what = f"model {name}"
    try:
        probing, miniatures = (load(f"bombus.architectures.{part}", "trainer") for part in ("probing", "miniatures"))
        folder = resolve_model(name)
    except (EngineFault, NotInstalled) as error:
        yield check(what, False, str(error), ELSEWHERE)
        return
    try:
        config = load_config(folder)
    except EngineFault as fault:
        yield check(f"{what}: architecture", False, str(fault), CURE)
        return
    findings = list(_architecture(what, config, miniatures))
    yield from findings
    if all(finding.state != State.MISSING for finding in findings):  # else its length does not matter
        yield _lengths(f"{what}: context", config, tokens, probing)


def _lengths(what: str, config: "PretrainedConfig", tokens: int | None, probing: ModuleType) -> Finding:
    try:
        context = probing.context_of(config)
        if tokens is not None:
            probing.check_context(config, tokens)
        probing.check_positions(config, tokens or context)
    except EngineFault as fault:
        return check(what, False, str(fault), SHORTER)
    wanted = "" if tokens is None else f", and sequences may have {tokens}"
    return Finding(what, State.OK, f"{context} tokens{wanted}")


def _architecture(what: str, config: "PretrainedConfig", miniatures: ModuleType) -> Iterator[Finding]:
    """Let engine and trainer check a tiny model, or say why transformers makes none."""
    with tempfile.TemporaryDirectory() as place:
        try:
            miniatures.write_miniature(config, Path(place))
        except EngineFault as fault:
            yield _untried(f"{what}: architecture", config, fault, miniatures)
            return
        for done, (module, extra) in CHECKS.items():
            yield _tried(f"{what}: {done}", config.model_type, Path(place), module, extra)


def _untried(what: str, config: "PretrainedConfig", untried: EngineFault, miniatures: ModuleType) -> Finding:
    """Return a refusal if transformers makes no model of the full size either."""
    try:
        miniatures.check_exists(config)
    except EngineFault as fault:
        return check(what, False, str(fault), CURE)
    return check(what, False, str(untried), AT_LOAD, needed=False)


def _tried(what: str, architecture: str, folder: Path, module: str, extra: str) -> Finding:
    try:
        load(module, extra).check_model(folder, TRIAL_TOKENS)
    except (EngineFault, NotInstalled) as error:
        return check(what, False, str(error), CURE)
    return Finding(what, State.OK, f"{architecture} is computed as transformers computes it")
