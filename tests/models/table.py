"""Writes docs/models.md from what engine and trainer do with each family: `python -m tests.models.table`."""

from collections.abc import Iterable
from pathlib import Path

from transformers.utils import logging as transformers_logging

from bombus.architectures.logits import AS_IS, LogitsForm
from bombus.architectures.miniatures import miniature_config
from tests.models.families import Found, families, full_config, measure

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
AGREES = 2e-5  # nats: on one processor minicpm3 was 1.14e-5 apart, on another below 1e-5

BEGINNING = """\
# Models

This page is generated (`python -m tests.models.table`, transformers 5.23), and `make test-models` compares it with what
engine, trainer and `bombus doctor` do with each of the {count} families of which transformers has a causal language
model.

The name of a model does not matter. When trainer or replica load one, they compare what they compute with
transformers' own forward pass, on a probe that is longer than every window that a sequence of the job can reach, and
longer than a page of the cache. Where the logprobs differ, or the model's code fails, one sentence names the
architecture: the trainer's ends the run in BOOTING, a replica's puts that replica in quarantine. `bombus doctor
--model PATH_OR_NAME` says so beforehand: it makes a tiny model of the same architecture and lets engine and trainer
check it. Code in a model's own folder is never run, and a folder that lacks some of the model's weights is refused.

A window that is longer than the job's `max_model_len` is no reason to refuse a model. A model whose context is shorter
than a `max_model_len` that the job sets is refused. Where the job leaves it at its default, sequences end at the
model's context: trainer and replica log it, and `bombus status` shows how long the sequences of each replica may be.

Models whose rotary embedding depends on the longest sequence (`dynamic`, `longrope`) are taken up to the length at
which it changes. Caps on attention scores, and sinks, are computed with all scores in memory: a layer then needs 4
bytes for each query head and pair of tokens.

## Families that are computed

A tiny random model of each, its windows shorter than the probe, in float32: engine and trainer agree with transformers'
eager forward pass to 2e-5 nats.
"""

REFUSED = """
## Families that are refused

Engine, trainer and doctor refuse them in one sentence each, by what their models do and not by their names: a model of
such a family that has only layers of attention, as some of `granitemoehybrid` have, is computed. The vllm backend of
the replicas and `trainer.backend: verl` run architectures of their own choice; verl's engine checks itself in the same
way.
"""

# What a refusal says, and what the page says about the families that are refused with it.
REASONS = {
    "keep state other than": "some of their layers keep state other than keys and values: hybrid models",
    "take no attention function": "they have no attention, or one that cannot be replaced from outside",
    "do not pass on": "their layers do not pass on the arguments of an attention function",
    "more than once": "a layer attends more than once",
    "not only in its": "layers outside the decoder attend too: encoders",
    "share their attention": "layers share their attention",
    "a mask of their own": "their layers attend through masks of their own",
    "which is not known here": "their attention takes biases of its own",
    "differ by up to": "they compute more than their attention function shows: encoders, their decoders, recurrences",
    "cannot be loaded": "transformers makes no causal language model of their configuration in this environment",
    "": "their own code fails with another attention: among them those that choose their keys themselves",
}


def page(found: Iterable[Found]) -> str:
    results = list(found)
    rows = [f"| `{each.family}` | {features(each.family)} |" for each in results if not each.refusals]
    table = "\n".join(["| family | besides plain attention |", "|---|---|", *rows])
    refused: dict[str, list[str]] = {}
    for each in results:
        if each.refusals:
            refused.setdefault(reason(each.refusals[0]), []).append(f"`{each.family}`")
    lines = [f"- {why}: {', '.join(refused[why])}" for why in REASONS.values() if why in refused]
    return "\n".join([BEGINNING.format(count=len(results)), table, REFUSED, *lines, ""])


def reason(sentence: str) -> str:
    """Return the reason that the page gives for a refusal, of which `sentence` is the message."""
    return next(why for part, why in REASONS.items() if part in sentence)


def features(family: str) -> str:
    """Say what the tiny model of a family has that a Llama has not."""
    text = miniature_config(full_config(family)).get_text_config()
    form = LogitsForm.of(text)
    kinds = set(getattr(text, "layer_types", None) or [])
    windowed = bool(getattr(text, "sliding_window", None)) and (not kinds or "sliding_attention" in kinds)
    has = {
        "a window of 16 tokens": windowed,
        "capped scores": bool(getattr(text, "attn_logit_softcapping", None)),
        "sinks": family in ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"),
        "capped logits": form.cap is not None,
        "scaled logits": form.scale != AS_IS.scale,
        "latent keys and values": bool(getattr(text, "kv_lora_rank", None)),
        "experts": any("expert" in name and bool(value) for name, value in text.to_dict().items()),
    }
    return ", ".join(name for name, present in has.items() if present)


def listed(text: str) -> tuple[set[str], dict[str, str]]:
    """Return the families that a page says are computed, and why it says that the others are refused."""
    computed, refused = text.split(REFUSED)
    rows = {line.split("`")[1] for line in computed.splitlines() if line.startswith("| `")}
    reasons = {name: line[2:].split(": `")[0] for line in refused.splitlines() for name in line.split("`")[1::2]}
    return rows, reasons


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    PAGE.write_text(page(map(measure, families())))
