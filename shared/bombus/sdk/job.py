"""`Job`: a run's configuration from keyword arguments, with the names that AgentJet users know."""

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from bombus.config.agentjet import AJET_KEYS, PASSED_ON
from bombus.config.documents import (
    LENGTHS,
    RunConfig,
    Tree,
    derive_lengths,
    no_effect,
    own_groups,
    parse_job,
    read_job_file,
    to_yaml,
)

log = logging.getLogger("bombus")

# Each keyword and its path below `ajet.`; paths that are not in AJET_KEYS are passed on, but have no effect here.
KEYWORDS: dict[str, str] = {
    "experiment_dir": "experiment_dir",
    "project_name": "project_name",
    "experiment_name": "experiment_name",
    "logging": "trainer_common.logger",
    "n_gpu": "trainer_common.n_gpus_per_node",
    "model": "model.path",
    "algorithm": "trainer_common.algorithm.adv_estimator",
    "num_repeat": "rollout.num_repeat",
    "batch_size": "data.train_batch_size",
    "swarm_mode": "enable_swarm_mode",
    "swarm_mode_sample_collection_method": "swarm_mode_sample_collection_method",
    "max_env_worker": "rollout.max_env_worker",
    "backbone": "backbone",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "max_response_length_in_one_turn": "rollout.max_response_length_in_one_turn",
    "max_model_len": "rollout.max_model_len",
    "mini_batch_num": "trainer_common.mini_batch_num",
    "lora_rank": "lora.lora_rank",
    "lora_alpha": "lora.lora_alpha",
    "lora_target_modules": "lora.target_modules",
    "lora_load_format": "lora.load_format",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "lr": "trainer_common.optim.lr",
}


class JobConfig:
    """A job's document."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def to_dict(self) -> Tree:
        return copy.deepcopy(self._tree)


class Job:
    """A validated job. Keywords override `base_yaml_config`, and `bombus` (our own groups) overrides keywords.

    Any of the four lengths may be given; the others are derived. `run` is the engine's resulting configuration. If the
    file has keys that have no effect and are not part of the document that the server reads, they are logged here.
    Raises `Refused(BAD_CONFIG)`.
    """

    def __init__(  # noqa: PLR0913 - AgentJet's signature
        self,
        base_yaml_config: str | Path | None = None,
        experiment_dir: str | None = None,
        project_name: str | None = None,
        experiment_name: str | None = None,
        logging: str | None = None,
        n_gpu: int | None = None,
        model: str | None = None,
        algorithm: str | None = None,
        num_repeat: int | None = None,
        batch_size: int | None = None,
        swarm_mode: bool | None = None,
        swarm_mode_sample_collection_method: str | None = None,
        max_env_worker: int | None = None,
        backbone: str | None = None,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        max_response_length_in_one_turn: int | None = None,
        max_model_len: int | None = None,
        mini_batch_num: int | None = None,
        lora_rank: int | None = None,
        lora_alpha: int | None = None,
        lora_target_modules: str | None = None,
        lora_load_format: str | None = None,
        gpu_memory_utilization: float | None = None,
        lr: float | None = None,
        bombus: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in KEYWORDS and value is not None}
        tree = read_job_file(base_yaml_config) if base_yaml_config is not None else {}
        base = parse_job(tree)
        lengths = {name: given[name] for name in LENGTHS if name in given}
        if lengths:
            given |= derive_lengths(lengths, {name: getattr(base.rollout, name) for name in LENGTHS})
        # Otherwise, a value in the file's own block would override the keyword.
        own = own_groups(tree)
        for name, value in given.items():
            group, _, field = AJET_KEYS.get(KEYWORDS[name], "").partition(".")
            if field in own.get(group, {}):
                own[group][field] = value
        for group, fields in (bombus or {}).items():
            own.setdefault(group, {}).update(fields)
        run = parse_job({"ajet": _with(tree.get("ajet") or {}, given), "bombus": own})
        left_out = _left_out(base)
        self.run: RunConfig = run.ignoring(left_out)
        for key in left_out:
            log.warning("%s", no_effect(key))
        self.config = JobConfig(_document(self.run, tree.get("ajet") or {}, given, own))
        for name, path in KEYWORDS.items():
            setattr(self, name, _get(self.config.to_dict()["ajet"], path))

    def dump_job_as_yaml(self, yaml_path: str | Path) -> str:
        """Write the job to a file, creating its folders, and return the path."""
        path = Path(yaml_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(self.config.to_dict()), encoding="utf-8")
        return str(yaml_path)

    @staticmethod
    def build_job_from_yaml(yaml_path: str | Path) -> "Job":
        return Job(base_yaml_config=yaml_path)


@runtime_checkable
class HasConfig(Protocol):
    """A job object: ours, or AgentJet's, which has the same attributes."""

    @property
    def config(self) -> Any: ...


JobLike = HasConfig | RunConfig | Mapping[str, Any] | str


def job_document(job: JobLike) -> Tree | str:
    """Return the document to send to `/sync_train_config`, as text or as a mapping."""
    if isinstance(job, str):
        return job
    if isinstance(job, RunConfig):
        return job.to_yaml_mapping()
    if isinstance(job, Mapping):
        return dict(job)
    document: Tree = job.config.to_dict()
    return document


def _document(run: RunConfig, ajet: Tree, given: Tree, own: Tree) -> Tree:
    """Write all settings below `ajet`, so that code that reads only that block sees the whole job."""
    effective = run.model_dump(mode="json")
    document = _with(ajet, {})
    for path, value in PASSED_ON.items():
        if _get(document, path) is None:
            _set(document, path, value)
    for path, ours in AJET_KEYS.items():
        group, _, field = ours.partition(".")
        _set(document, path, effective[group][field])
    for name, value in given.items():
        if KEYWORDS[name] not in AJET_KEYS:
            _set(document, KEYWORDS[name], value)
    return {"ajet": document, "bombus": own} if own else {"ajet": document}


def _left_out(base: RunConfig) -> list[str]:
    """Return the keys without effect that are outside `ajet`. They are missing from the job's own document, which
    contains only the keys inside `ajet`."""
    return [key for key in base.ignored if not key.startswith("ajet.")]


def _with(tree: Tree, given: Tree) -> Tree:
    """Return a copy of AgentJet's block with these keywords set."""
    changed = copy.deepcopy(tree)
    for name, value in given.items():
        _set(changed, KEYWORDS[name], value)
    return changed


def _set(tree: Tree, path: str, value: object) -> None:
    *groups, leaf = path.split(".")
    for group in groups:
        inner = tree.get(group)
        if not isinstance(inner, dict):
            inner = tree[group] = {}
        tree = inner
    tree[leaf] = value


def _get(tree: Tree, path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
