"""Writes docs/models.md from what engine and trainer do with each family: `python -m tests.models.table`."""

from collections.abc import Iterable
from pathlib import Path

from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from bombus.architectures.logits import AS_IS, LogitsForm
from bombus.architectures.miniatures import miniature_config
from tests.models.families import FIELDS, NOT_TRIED, Found, families, measure

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
AGREES = 1e-5  # nats

BEGINNING = """\
# Models

This page is generated (`python -m tests.models.table`, transformers 5.23), and `make test-models` compares it with what
engine and trainer do.

What a model is called decides nothing. When trainer or replica load one, they compare what they compute with
transformers' own forward pass, on a probe that is longer than every window that a sequence of the job can reach, and
longer than a page of the cache. Where the logprobs differ, or the model's code fails, the run ends in BOOTING with one
sentence that names the architecture. `bombus doctor --model PATH_OR_NAME` says so beforehand: it makes a tiny model of
the same architecture and lets engine and trainer check it. A window that is longer than the job's `max_model_len` is no
reason to refuse a model. A model whose context is shorter than a `max_model_len` that the job sets is refused; where
the job leaves it at its default, sequences end at the model's context.

Models whose rotary embedding depends on the longest sequence (`dynamic`, `longrope`) are taken up to the length at
which it changes. Caps on attention scores, and sinks, are computed with all scores in memory: a layer then needs 4
bytes for each query head and pair of tokens.

## Families that are computed

A tiny random model of each, its windows shorter than the probe, in float32: engine and trainer agree with transformers'
eager forward pass to 1e-5 nats.
"""

REFUSED = """
## Families that are refused

Engine, trainer and doctor refuse them in one sentence: they are not causal language models of attention alone
(encoders, encoder-decoders, recurrent and hybrid models), choose their keys themselves, or take no attention function
from outside.
"""

UNTRIED = """
## Families that are not tried here

Their default configuration does not make a tiny model. The check at load decides on a real one.
"""


def page(found: Iterable[Found]) -> str:
    results = list(found)
    refused = [each.family for each in results if each.refusals and NOT_TRIED not in each.refusals[0]]
    untried = [each.family for each in results if each.refusals and NOT_TRIED in each.refusals[0]]
    rows = [f"| `{each.family}` | {features(each.family)} |" for each in results if not each.refusals]
    table = "\n".join(["| family | besides plain attention |", "|---|---|", *rows])
    return f"{BEGINNING}\n{table}\n{REFUSED}\n{_listed(refused)}\n{UNTRIED}\n{_listed(untried)}\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def features(family: str) -> str:
    """Say what the tiny model of a family has that a Llama has not."""
    config = AutoConfig.for_model(family, **FIELDS.get(family, {}))
    text = miniature_config(config).get_text_config()
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


def listed(text: str) -> tuple[set[str], set[str], set[str]]:
    """Return the families that a page says are computed, refused and not tried."""
    computed, rest = text.split(REFUSED)
    refused, untried = rest.split(UNTRIED)
    rows = {line.split("`")[1] for line in computed.splitlines() if line.startswith("| `")}
    return rows, set(refused.split("`")[1::2]), set(untried.split("`")[1::2])


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    PAGE.write_text(page(map(measure, families())))
