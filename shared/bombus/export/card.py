"""The model card of an exported version: what it is, how to load it, and where it comes from according to the log.

It contains nothing about the machine or the time of the export, so the same version gives the same card.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import PurePath

from bombus.config.job import RunConfig
from bombus.export.writing import ExportedFiles
from bombus.figures import one_line
from bombus.hive.events import BatchReady
from bombus.replay.logged_run import LoggedRun, LoggedStep
from bombus.weights.adapters import VLLM_RANKS
from bombus.weights.models import hub_name

CARD = "README.md"
WRITTEN_BY = "# Written by `bombus export`."
REWARDS_SHOWN = 20
SHARE_SHOWN = 0.001  # the smallest loss of an adapter to rounding that the card mentions
TEXT_CHARS_MAX = 200  # settings with longer values are not shown


def loading(exported: ExportedFiles, place: str, base_model: str) -> list[tuple[str, str]]:
    """Return the tools that load an export at `place`, each with the code or command that does it."""
    quoted, base = shlex.quote(place), shlex.quote(base_model)
    if not exported.rank:
        return [
            ("transformers", f'AutoModelForCausalLM.from_pretrained("{place}")'),
            ("vLLM", f"vllm serve {quoted}"),
        ]
    rank = next((each for each in VLLM_RANKS if each >= exported.rank), exported.rank)
    return [
        ("peft", f'AutoPeftModelForCausalLM.from_pretrained("{place}")'),
        ("vLLM", f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules trained={quoted}"),
    ]


def card(hive: str, run: LoggedRun, number: int, exported: ExportedFiles, base_model: str) -> str:
    """Return the text of the card. `base_model` is the argument with which `from_pretrained` loads the job's model."""
    steps = [run.steps[step] for step in sorted(run.steps) if step <= number]
    name = one_line(PurePath(run.job.model.path).name)
    parts = [
        *_front_matter(run.job, exported),
        f"# {name}, trained with bombus",
        "",
        f"Policy version {number} of run {run.run}, engine {run.engine}, hive {hive}: "
        f"`{one_line(run.job.model.path)}` after {number} optimizer step{'s' * (number != 1)}.",
        "",
        "## Use it",
        "",
        *(f"- {tool}: `{line}`" for tool, line in loading(exported, "path/to/this/folder", base_model)),
        "",
        "## How it was trained",
        "",
        *_table(("", ""), _facts(run, number, steps)),
        "",
        *_own_settings(run.job),
        *_rewards(number, steps),
        "## Weights",
        "",
        *_table(("file", "sha256"), ((f"`{file}`", f"`{digest}`") for file, digest in exported.digests.items())),
        "",
        *_origin(run, number, exported),
    ]
    return "\n".join(parts)


def _front_matter(job: RunConfig, exported: ExportedFiles) -> Iterator[str]:
    """Yield the metadata that the hub reads. A base model unknown to the hub is left out, because the hub would refuse
    it."""
    hub = hub_name(job.model.path)
    tags = ["bombus", "reinforcement-learning", job.trainer.adv_estimator, *(["lora"] if job.trainer.lora_rank else [])]
    yield "---"
    yield WRITTEN_BY
    if hub:
        yield f"base_model: {json.dumps(hub)}"
    yield f"library_name: {'peft' if exported.rank else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield f"tags: {json.dumps(tags)}"
    yield "---"
    yield ""


def _facts(run: LoggedRun, number: int, steps: Sequence[LoggedStep]) -> Iterator[tuple[str, str]]:
    job = run.job
    rules, trainer = job.collection, job.trainer
    lora = f"LoRA adapters of rank {trainer.lora_rank}, alpha {trainer.lora_alpha}, on {trainer.target_modules}"
    yield "base model", f"`{one_line(job.model.path)}`"
    yield "trained", lora if trainer.lora_rank else "all weights"
    yield "advantages", trainer.adv_estimator
    yield "loss", f"{trainer.loss}, correction {trainer.correction}"
    yield "learning rate", f"{trainer.lr:g}, {trainer.lr_schedule}"
    yield "KL penalty", f"{trainer.kl_coef:g}, {trainer.kl_estimator}" if trainer.kl_coef else "none"
    yield "batch", f"{rules.batch_size} groups of {job.rollout.num_repeat} episodes ({rules.method})"
    yield "temperature", f"{job.rollout.temperature:g}"
    yield "trained on", _trained_on(run, number, steps)
    if run.started_ns:
        yield "run started", _date(run.started_ns)
    if run.begun:
        yield "run begun", one_line(run.begun)
    if number in run.versions:
        yield "version made", _date(run.versions[number].at_ns)
    yield "job", f"`{run.job_digest}`"
    yield "bombus", version_of("bombus")


def _trained_on(run: LoggedRun, number: int, steps: Sequence[LoggedStep]) -> str:
    groups = sum(len(step.batch.groups) for step in steps)
    episodes = sum(len(_scores(step.batch)) for step in steps)
    left_out = sum(int(step.done.metrics.get("episodes_left_out", 0)) for step in steps if step.done is not None)
    less = f", {left_out:,} of them left out" if left_out else ""
    earlier = f"; steps 1 to {run.first} were made in earlier runs" if run.first else ""
    unknown = number - len(steps)
    gone = f"; steps {run.first + 1} to {unknown} were removed by compacting the log" if unknown > run.first else ""
    return f"{episodes:,} episodes in {groups:,} groups{less}{earlier}{gone}"


def _own_settings(job: RunConfig) -> Iterator[str]:
    """Yield the job's settings that differ from the defaults, in the form of a job file."""
    defaults = RunConfig().model_dump(mode="json")
    given = job.model_dump(mode="json") | {"trainer": job.trainer.own_choices()}
    changed = {
        group: {name: _shortened(value) for name, value in fields.items() if value != defaults[group].get(name)}
        for group, fields in given.items()
    }
    yield "Settings of the job that are not the defaults:"
    yield ""
    yield "```json"
    yield json.dumps({group: fields for group, fields in changed.items() if fields}, indent=2, ensure_ascii=False)
    yield "```"
    yield ""


def _shortened(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
        return f"({len(value):,} characters)"
    return value


def _rewards(number: int, steps: Sequence[LoggedStep]) -> Iterator[str]:
    if not steps:
        return
    shown = _evenly(steps)
    yield "## Rewards"
    yield ""
    if len(shown) < len(steps):
        yield f"{len(shown)} of {len(steps)} steps:"
        yield ""
    yield from _table(("step", "episodes", "mean reward", "lowest", "highest", "completed"), map(_reward_row, shown))
    yield ""


def _evenly(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """Return at most `REWARDS_SHOWN` of the steps, evenly spread, including the first and the last."""
    if len(steps) <= REWARDS_SHOWN:
        return list(steps)
    gaps = REWARDS_SHOWN - 1
    return [steps[(len(steps) - 1) * place // gaps] for place in range(REWARDS_SHOWN)]


def _reward_row(step: LoggedStep) -> tuple[str, ...]:
    rewards = _scores(step.batch)
    mean = sum(rewards) / max(len(rewards), 1)
    scores = (f"{value:.4g}" for value in (mean, min(rewards, default=0), max(rewards, default=0)))
    return str(step.batch.step), str(len(rewards)), *scores, _date(step.done.at_ns) if step.done is not None else ""


def _scores(batch: BatchReady) -> list[float]:
    return [episode.reward for group in batch.groups for episode in group.episodes]


def _origin(run: LoggedRun, number: int, exported: ExportedFiles) -> Iterator[str]:
    weights = run.versions[number].weights
    if weights.adapter_of is None:
        yield f"The log records this version as one file with sha256 `{weights.sha256}`."
    else:
        yield (
            f"The log records this version as an adapter with sha256 `{weights.sha256}`, for a model whose file has "
            f"sha256 `{weights.adapter_of.sha256}`."
        )
    if exported.share_lost >= SHARE_SHOWN:
        yield (
            f"Merging lost {exported.share_lost:.1%} of what the adapter adds to rounding, measured as a norm; "
            "`bombus export --merged --float32` keeps all of it."
        )
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _date(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
