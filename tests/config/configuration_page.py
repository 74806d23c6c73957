"""Writes docs/configuration.md from the models of the configuration: `python -m tests.config.configuration_page`."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bombus.config import agentjet, cluster, xorl
from bombus.config.agentjet import AJET_KEYS
from bombus.config.groups import allowed
from bombus.config.job import GROUPS, RunConfig
from bombus.config.parts import CoordinatorPart, DeployPart, GatewayPart, InferencePart, TrainerPart, WebPart
from bombus.config.streams import StreamLimits
from bombus.sdk.job import KEYWORDS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

BEGINNING = """\
# Configuration

This page is generated from the sources (`python -m tests.config.configuration_page`), and a test compares it with them.

Two kinds of documents are read, both as YAML or JSON:

- a **job** says what an engine trains, and how. It goes to `sync_train_config`, to `bombus up --config`, or into a
  cluster file. A job can be written in three ways: with [our own](#a-job-below-bombus) groups below `bombus:`, with
  [AgentJet's](#agentjets-keys-below-ajet) keys below `ajet:`, and with [xorl's](#xorls-flat-keys) flat keys at the top.
  Where two of them set the same thing, `bombus:` wins;
- a [**cluster file**](#a-cluster-file) says which processes run, and contains or names the jobs of their engines. Its
  keys at the top tell it from a job. `bombus up --config FILE` starts it, `--dry-run` prints the commands, and
  `bombus doctor --config FILE` checks beforehand what is missing. Flags on the command line win over the file.

A mistake is refused in one sentence that names the key, its value and what it takes.
Examples: `examples/server/qwen3_8b_full.yaml` and `examples/server/cluster.yaml`.
"""


def page() -> str:
    parts = [
        BEGINNING,
        "## A job, below `bombus:`\n",
        *_job(),
        *_slime(),
        *_agentjet(),
        *_verl(),
        *_xorl(),
        *_cluster(),
    ]
    return "\n".join(parts)


# ---- a job --------------------------------------------------------------------------------------------------------


def _job() -> Iterator[str]:
    yield "```yaml\nbombus:\n  model: {path: smollm2}\n  trainer: {lr: 1.0e-4, lora_rank: 16}\n```\n"
    yield (
        "Any of the four lengths below `rollout` may be given; the others follow. With `max_model_len` alone, the "
        "prompt before\nthe first answer may have half of it, at most the default, and the answers have the rest.\n"
        "`model.tokenizer` is for a tokenizer that is not in the model's folder. A tokenizer of another model ends the "
        "run at boot,\nand the error says what does not fit.\n"
    )
    for group in GROUPS:
        model = RunConfig.model_fields[group].annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        yield f"### `{group}`\n\n{_prose(model)}"
        yield _fields(model)


def _slime() -> Iterator[str]:
    if importlib.util.find_spec("bombus.config.slime") is None:
        return
    slime: Any = importlib.import_module("bombus.config.slime")
    yield "### slime's names\n\nThey are accepted below `bombus.trainer`, beside our own.\n"
    rows = [(name, f"`{ours}`") for name, ours in slime.RENAMED.items()]
    for name, (ours, meaning) in slime.SWITCHES.items():
        rows.append(
            (name, "; ".join(f"{_value(given)}: `{ours}: {_value(value)}`" for given, value in meaning.items()))
        )
    rows += [("eps_clip", "`clip_low`, and `clip_high` where that is not given")]
    rows += [("use_kl_loss", "false: `kl_coef` has no effect")]
    rows += [("kl_coef", "only 0 beside one of these names, where it means the KL in the reward")]
    rows += [("use_tis", "true: as `tis_level` and `tis_mode` say; false: `correction: none`")]
    for level, modes in slime.CORRECTIONS.items():
        for mode, ours in modes.items():
            rows.append((f"tis_level: {level}, tis_mode: {mode}", f"`correction: {ours}`"))
    for name, ours in slime.ESTIMATORS.items():
        meaning = ", ".join(f"`{field}: {value}`" for field, value in ours.items())
        rows.append((f"advantage_estimator: {name}", meaning))
    rows += [("advantage_estimator", "`adv_estimator`, for any other")]
    yield _table(("key", "meaning here"), ((f"`{name}`", meaning) for name, meaning in rows))


def _agentjet() -> Iterator[str]:
    yield "## AgentJet's keys, below `ajet:`\n"
    yield (
        "A key that decides what is trained is carried out or refused. All others are accepted and have no effect: the "
        "client logs\nthem, `bombus up` and `doctor` print them, and the reply to `sync_train_config` lists them as "
        "`ignored`. `Job` sends\n"
        "nothing of its file outside `ajet:` and `bombus:` that has no effect, so it logs those keys itself. A value "
        "of -1 for\nwarm-up or total steps means that it is not set. `backbone: torch` is the torch backend.\n"
    )
    rows = [(f"`ajet.{key}`", f"`{ours}`") for key, ours in AJET_KEYS.items()]
    rows.append(("`ajet.trainer_common.use_kl_loss`", "false: `trainer.kl_coef` has no effect"))
    yield _table(("key", "meaning here"), rows)


def _keywords() -> Iterator[str]:
    yield "## `Job`'s keywords\n"
    yield (
        "`Job(...)` takes AgentJet's keywords, `base_yaml_config` with the path of a job to begin with, and `bombus` "
        "with our own\ngroups, which win. What is not given is as in the job, or the default.\n"
    )
    rows = [
        (f"`{name}`", f"`{AJET_KEYS[path]}`" if path in AJET_KEYS else "no effect") for name, path in KEYWORDS.items()
    ]
    yield _table(("keyword", "meaning here"), rows)


def _verl() -> Iterator[str]:
    yield "## verl's keys\n"
    yield (
        "They may stand beside `ajet:`, or in its place. Two keys that give one setting different values are refused, "
        "and so is any\nkey below `actor_rollout_ref.model`, `actor_rollout_ref.actor` and `algorithm` that is not "
        "listed here and decides what is trained.\n"
    )
    rows = [(f"`{key}`", f"`{ours}`") for key, ours in agentjet.VERL_KEYS.items()]
    rows.append(
        (
            "`actor_rollout_ref.actor.use_kl_loss`",
            "false, or not given without `ajet:`: `trainer.kl_coef` has no effect",
        )
    )
    yield _table(("key", "meaning here"), rows)
    yield "Accepted with the values that change nothing here, and refused with others:\n"
    limited = [
        (f"`{key}`", ", ".join(f"`{value}`" for value in only.values), only.why)
        for key, only in agentjet.LIMITED.items()
    ]
    yield _table(("key", "values", "why not others"), limited)


def _xorl() -> Iterator[str]:
    yield "## xorl's flat keys\n"
    yield (
        "They stand at the top of a document, with our own groups below `bombus:` for what xorl leaves to its clients "
        "(batch size,\nrollout, learning rate). An unknown key is refused, and the refusal suggests the nearest one.\n"
    )
    rows = [(f"`{key}`", f"`{ours}`") for key, ours in xorl.MAPPED.items()]
    rows += [(f"`{key}`", meaning) for key, meaning in xorl.READ.items()]
    rows += [(f"`{key}`", f"it must be the same as `{same}`") for key, same in xorl.SAME_AS.items()]
    yield _table(("key", "meaning here"), rows)
    yield "### Accepted with one value, and refused by name with any other\n"
    limited = ((f"`{key}`", ", ".join(map(_quoted, only.values)), only.why) for key, only in xorl.LIMITED.items())
    yield _table(("key", "accepted", "why no other"), limited)
    yield "### Accepted, and without effect\n"
    yield _table(("key", "because"), ((f"`{key}`", why) for key, why in xorl.IGNORED.items()))


# ---- a cluster file -----------------------------------------------------------------------------------------------


def cluster_parts() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every part of a cluster file with its path."""
    yield "", cluster.Cluster
    yield "gateway", GatewayPart
    yield "coordinator", CoordinatorPart
    yield "web", WebPart
    yield "deploy", DeployPart
    yield "streams", StreamLimits
    yield "engines.NAME", cluster.EnginePart
    yield "engines.NAME.trainer", TrainerPart
    yield "engines.NAME.inference[]", InferencePart


def _cluster() -> Iterator[str]:
    yield "## A cluster file\n"
    for path, model in cluster_parts():
        yield f"### `{path}`\n\n{_prose(model)}" if path else f"### at the top\n\n{_prose(model)}"
        yield _fields(model)


# ---- tables -------------------------------------------------------------------------------------------------------


def _prose(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "") + "\n"


def _fields(model: type[BaseModel]) -> str:
    """Return a table with a row for each field; a field that is a part has its own table."""
    rows = []
    for name, field in model.model_fields.items():
        inner = cluster.part_of(field.annotation)
        takes = "see below" if inner is not None else allowed(field).removeprefix("it must be ")
        rows.append((f"`{name}`", takes, "" if inner is not None else _default(field)))
    return _table(("key", "takes", "default"), rows)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "follows from others"
    return "" if field.is_required() else _quoted(field.default)


def _quoted(value: object) -> str:
    return "nothing" if value is None else "empty" if value in ("", (), {}) else f"`{_value(value)}`"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, tuple) else str(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def keys() -> Mapping[str, list[str]]:
    """Return every key that a document may have, by kind: the page has to name them all."""
    groups = {group: RunConfig.model_fields[group].annotation for group in GROUPS}
    return {
        **{group: list(model.model_fields) for group, model in groups.items() if isinstance(model, type)},
        "ajet": [f"ajet.{key}" for key in AJET_KEYS],
        "xorl": list(xorl.KEYS),
        **{path: list(model.model_fields) for path, model in cluster_parts()},
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
