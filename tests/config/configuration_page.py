"""Writes docs/configuration.md from the models that read it: `python -m tests.config.configuration_page`."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bombus.config import cluster, xorl
from bombus.config.documents import AJET_KEYS
from bombus.config.groups import allowed
from bombus.config.job import GROUPS, RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

BEGINNING = """\
# Configuration

This page is made from the sources (`python -m tests.config.configuration_page`), and a test compares it with them.

Two kinds of documents are read, both as YAML or JSON:

- a **job** says what an engine trains, and how. It goes to `sync_train_config`, to `bombus up --config`, or into a
  cluster file. Three ways of writing one are understood: [our own](#a-job-below-bombus) groups below `bombus:`,
  [AgentJet's](#agentjets-keys-below-ajet) keys below `ajet:`, and [xorl's](#xorls-flat-keys) flat keys at the top.
  Where two say the same thing, `bombus:` wins;
- a [**cluster file**](#a-cluster-file) says which processes run, and has or names the jobs of their engines. It is
  told from a job by its keys at the top. `bombus up --config FILE` starts it, `--dry-run` prints the commands, and
  `bombus doctor --config FILE` says beforehand what is missing. Flags on the command line win over the file.

What is wrong is refused in one sentence that names the key, its value and what it takes.
Examples: `examples/server/qwen3_8b_full.yaml` and `examples/server/cluster.yaml`.
"""


def page() -> str:
    parts = [BEGINNING, "## A job, below `bombus:`\n", *_job(), *_slime(), *_agentjet(), *_xorl(), *_cluster()]
    return "\n".join(parts)


# ---- a job --------------------------------------------------------------------------------------------------------


def _job() -> Iterator[str]:
    yield "```yaml\nbombus:\n  model: {path: smollm2}\n  trainer: {lr: 1.0e-4, lora_rank: 16}\n```\n"
    yield (
        "Of the four lengths below `rollout` any may be given: the rest follows. `model.tokenizer` is for a tokenizer "
        "that is not in\nthe model's folder. One that is not the model's ends the run at boot with the misfit in "
        "words.\n"
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
    yield "### slime's names\n\nThey are understood below `bombus.trainer`, beside our own.\n"
    rows = [(name, f"`{ours}`") for name, ours in slime.RENAMED.items()]
    for name, (ours, meaning) in slime.SWITCHES.items():
        rows.append((name, "; ".join(f"{_value(said)}: `{ours}: {_value(value)}`" for said, value in meaning.items())))
    rows += [("eps_clip", "`clip_low`, and `clip_high` while that is not given")]
    rows += [("use_kl_loss", "false: `kl_coef` does not count")]
    rows += [("kl_coef", "beside one of these names only 0: there it is the KL in the reward")]
    rows += [("use_tis", "true: as `tis_level` and `tis_mode` say; false: `correction: none`")]
    for level, modes in slime.CORRECTIONS.items():
        for mode, ours in modes.items():
            rows.append((f"tis_level: {level}, tis_mode: {mode}", f"`correction: {ours}`"))
    for name, ours in slime.ESTIMATORS.items():
        said = ", ".join(f"`{field}: {value}`" for field, value in ours.items())
        rows.append((f"advantage_estimator: {name}", said))
    rows += [("advantage_estimator", "`adv_estimator`, for any other")]
    yield _table(("key", "what it is here"), ((f"`{name}`", meaning) for name, meaning in rows))


def _agentjet() -> Iterator[str]:
    yield "## AgentJet's keys, below `ajet:`\n"
    yield (
        "All other keys of AgentJet's are taken and mean nothing here; the reply to `sync_train_config` lists them as "
        "`ignored`,\nexcept those that `Job` sends along with AgentJet's own defaults. A value of -1 for warm-up or "
        "total steps means that it\nis not set. `backbone: torch` is the torch backend.\n"
    )
    rows = [(f"`ajet.{key}`", f"`{ours}`") for key, ours in AJET_KEYS.items()]
    rows.append(("`ajet.trainer_common.use_kl_loss`", "false: `trainer.kl_coef` does not count"))
    yield _table(("key", "what it is here"), rows)


def _xorl() -> Iterator[str]:
    yield "## xorl's flat keys\n"
    yield (
        "At the top of a document, with our own groups below `bombus:` for what xorl leaves to its clients (batch "
        "size, rollout,\nlearning rate). An unknown key is refused with the one that was probably meant.\n"
    )
    rows = [(f"`{key}`", f"`{ours}`") for key, ours in xorl.MAPPED.items()]
    rows += [(f"`{key}`", meaning) for key, meaning in xorl.READ.items()]
    rows += [(f"`{key}`", f"it has to be what `{same}` is") for key, same in xorl.SAME_AS.items()]
    yield _table(("key", "what it is here"), rows)
    yield "### Taken for one value, and refused by name for any other\n"
    limited = ((f"`{key}`", ", ".join(map(_quoted, only.values)), only.why) for key, only in xorl.LIMITED.items())
    yield _table(("key", "taken", "why no other"), limited)
    yield "### Taken, and without effect\n"
    yield _table(("key", "because"), ((f"`{key}`", why) for key, why in xorl.IGNORED.items()))


# ---- a cluster file -----------------------------------------------------------------------------------------------


def _cluster() -> Iterator[str]:
    yield "## A cluster file\n"
    for path, model in cluster.parts():
        yield f"### `{path}`\n\n{_prose(model)}" if path else f"### at the top\n\n{_prose(model)}"
        yield _fields(model)


# ---- tables -------------------------------------------------------------------------------------------------------


def _prose(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "") + "\n"


def _fields(model: type[BaseModel]) -> str:
    """One row a field; a field that is a part of its own has a table of its own."""
    rows = []
    for name, field in model.model_fields.items():
        inner = cluster.part_of(field.annotation)
        takes = "see below" if inner is not None else allowed(field).removeprefix("it takes ")
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
    """Every key that some document may have, by kind: what the page has to name."""
    groups = {group: RunConfig.model_fields[group].annotation for group in GROUPS}
    return {
        **{group: list(model.model_fields) for group, model in groups.items() if isinstance(model, type)},
        "ajet": [f"ajet.{key}" for key in AJET_KEYS],
        "xorl": list(xorl.KEYS),
        **{path: list(model.model_fields) for path, model in cluster.parts()},
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
