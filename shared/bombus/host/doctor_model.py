"""Checks whether gateways can use a model's tokenizer and chat template, and whether the engine and the trainer can
compute the model.

The second check uses a tiny model of the same architecture.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bombus.cli import NotInstalled, load
from bombus.config.job import NO_CHAT_TEMPLATE, ModelConfig
from bombus.errors import EngineFault
from bombus.host.doctor import Finding, State, check
from bombus.weights.models import load_config, load_tokenizer_files, resolve_model, resolve_tokenizer
from bombus.weights.tokenizer_fit import check_fit

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TRIAL_TOKENS = 256  # far beyond the windows of a tiny model
CHECKS = {
    "served": ("bombus_inference.backends.torch.backend", "inference"),
    "trained": ("bombus_trainer.loading", "trainer"),
}
READER = ("bombus_gateway.text.rendering", "gateway")
SHORTER = "set rollout.max_model_len lower, or use a model with a longer context"
_AS_TEXT = "plain text, as no syntax is known"
TEXT_CURE = "correct the model's files, or the job's model.chat_template"
ELSEWHERE = "name its folder, or download it to this machine"
CURE = (
    "use a model of a family that docs/models.md lists as computed; the vllm backend of the replicas and "
    "trainer.backend verl support some others, which they check themselves"
)
AT_LOAD = "the trainer and the replicas check it when they load it"


def examine_text(what: str, model: ModelConfig) -> Finding:
    """Check that gateways can use the tokenizer and the chat template of a job's model, as its trainer does at boot."""
    try:
        checking = load("bombus.text.checking", "gateway")
        tokenizer = resolve_tokenizer(model.tokenizer) if model.tokenizer else None
        files = load_tokenizer_files(resolve_model(model.path), tokenizer)
        check_fit(files, model.path, model.tokenizer or model.path)
        files = checking.with_chat_template(files, model.chat_template)
        checking.check_text(files, model)
        if model.chat_template == NO_CHAT_TEMPLATE:
            return Finding(what, State.OK, "none, for plain completions only")
        found = load(*READER).syntaxes_of(files, model)
    except EngineFault as error:
        return check(what, False, str(error), TEXT_CURE)
    except NotInstalled as error:
        return check(what, False, str(error), error.remedy, needed=False)
    calls, reasoning = (_AS_TEXT if syntax == "text" else syntax for syntax in found.values())
    return Finding(what, State.OK, f"it renders user messages; tool calls: {calls}; reasoning: {reasoning}")


def examine_model(name: str, tokens: int | None = None, given: ModelConfig | None = None) -> Iterator[Finding]:
    """Check the model `name` for sequences of `tokens` tokens, or of up to its context length if `tokens` is None.

    `given` is the job's configuration of the model. The weights are not read: what a model family computes does not
    depend on them.
    """
    what = f"model {name}"
    try:
        probing, miniatures = (load(f"bombus.architectures.{part}", "trainer") for part in ("probing", "miniatures"))
        folder = resolve_model(name)
    except (EngineFault, NotInstalled) as error:
        yield check(what, False, str(error), ELSEWHERE)
        return
    yield examine_text(f"{what}: chat template", given or ModelConfig(path=name))
    try:
        config = load_config(folder)
    except EngineFault as fault:
        yield check(f"{what}: architecture", False, str(fault), CURE)
        return
    findings = list(_architecture(what, config, miniatures))
    yield from findings
    if all(finding.state != State.MISSING for finding in findings):  # otherwise the model's length does not matter
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
    """Have the engine and the trainer check a tiny model, or yield why transformers cannot make one."""
    with tempfile.TemporaryDirectory() as place:
        try:
            miniatures.write_miniature(config, Path(place))
        except EngineFault as fault:
            yield _untried(f"{what}: architecture", config, fault, miniatures)
            return
        for done, (module, extra) in CHECKS.items():
            yield _tried(f"{what}: {done}", config.model_type, Path(place), module, extra)


def _untried(what: str, config: "PretrainedConfig", untried: EngineFault, miniatures: ModuleType) -> Finding:
    """Return a finding for a model that was not tried. It is `missing` if transformers cannot make the full-size model
    either, and otherwise `optional`."""
    try:
        miniatures.empty_model(config)
    except EngineFault as fault:
        return check(what, False, str(fault), CURE)
    return check(what, False, str(untried), AT_LOAD, needed=False)


def _tried(what: str, architecture: str, folder: Path, module: str, extra: str) -> Finding:
    try:
        load(module, extra).check_model(folder, TRIAL_TOKENS)
    except (EngineFault, NotInstalled) as error:
        return check(what, False, str(error), CURE)
    return Finding(what, State.OK, f"{architecture} is computed as transformers computes it")
