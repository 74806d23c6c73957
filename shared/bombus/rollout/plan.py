"""The command line of a rollout, checked before any episode is claimed."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bombus.config.flags import Flag
from bombus.errors import Code, Refused
from bombus.hive.collection import BATCH_METHODS
from bombus.rollout.commands import CommandTemplate, check_fields, check_program, parse_command
from bombus.rollout.harbor.folders import read_task_folders
from bombus.rollout.harbor.sandbox import check_sandbox, hides
from bombus.rollout.presets import NO_PRESET, PRESETS, ApiDialect, HarnessPreset, preset_of
from bombus.rollout.tasks import AgentTask, read_tasks
from bombus.rollout.watch import EpisodeLimits
from bombus.rollout.workspace import check_out, check_scratch, check_workspace
from bombus.sdk.transport import address
from bombus.sdk.types import PoolInformation

URL = "http://127.0.0.1:10086"
DAY_S = 86_400.0
COUNT_MAX = 1_000_000
METHODS_OF_TASKS = {name for name, method in BATCH_METHODS.items() if method.counts_tasks}


class RolloutOptions(BaseModel):
    """The command line of `bombus rollout`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Annotated[Path, Flag(declared_elsewhere=True)]
    agent: Annotated[str, Flag(declared_elsewhere=True)]
    reward: Annotated[str, Flag(declared_elsewhere=True)] = ""
    n: Annotated[int | None, Flag(declared_elsewhere=True)] = Field(default=None, ge=1, le=4096)

    workspace: Annotated[Path | None, Flag(metavar="DIR", default="an empty folder")] = Field(
        default=None, description="the folder that is copied for each episode; its commands run in the copy"
    )
    url: Annotated[str, Flag(metavar="URL")] = Field(
        default=URL, description="the hive; its key comes from $BOMBUS_CLIENT_KEY or $BOMBUS_ADMIN_KEY"
    )
    engine: Annotated[str, Flag(metavar="NAME", default="the hive's first")] = Field(
        default="", description="the engine that serves the model"
    )
    job: Annotated[Path | None, Flag(metavar="FILE")] = Field(
        default=None, description="start this job first, or join it if it is running; without it, a job must be running"
    )
    eval: bool = Field(default=False, description="play evaluation episodes, which are not trained on")

    preset: Annotated[str, Flag(metavar="NAME", default="the agent's first word, if it is a preset")] = Field(
        default="",
        description=f"the harness whose variables and files are set: {', '.join(PRESETS)}, or {NO_PRESET}",
    )
    dialect: Annotated[tuple[ApiDialect, ...], Flag(default="all")] = Field(
        default=(), description="the API whose variables an agent without a preset gets; may be given several times"
    )
    sandbox: Annotated[str, Flag(metavar="CMD")] = Field(
        default="", description="a command to put before the agent's and the reward's, such as `bwrap ...`"
    )

    timeout_s: Annotated[float, Flag(metavar="SECONDS")] = Field(
        default=1800.0, gt=0, le=DAY_S, description="how long an agent may take"
    )
    reward_timeout_s: Annotated[float, Flag(metavar="SECONDS")] = Field(
        default=300.0, gt=0, le=DAY_S, description="how long the reward command may take"
    )
    turns_max: int | None = Field(
        default=None, ge=1, description="stop an agent after this many model calls (checked once a second)"
    )
    tokens_max: int | None = Field(
        default=None, ge=1, description="stop an agent whose calls have sampled this many tokens; checked once a second"
    )
    on_limit: Literal["reward", "abort"] = Field(
        default="reward", description="what to do with an episode whose agent was stopped at a limit"
    )
    retries: int = Field(
        default=2, ge=0, le=100, description="how many times to replay an episode whose infrastructure failed"
    )

    concurrency: int = Field(default=8, ge=1, le=1024, description="how many agents run at the same time")
    epochs: Annotated[int | None, Flag(default="1, unlimited with --steps")] = Field(
        default=None, ge=1, le=COUNT_MAX, description="how many times to go through the tasks"
    )
    steps: int | None = Field(
        default=None, ge=1, le=COUNT_MAX, description="run until the trainer has made this many more steps"
    )
    seed: int | None = Field(
        default=None, description="shuffle the tasks, differently in each epoch; without it they keep their order"
    )
    out: Annotated[Path | None, Flag(metavar="DIR")] = Field(
        default=None, description="the folder for episodes.jsonl, with a line for each episode, and for agents' output"
    )
    scratch: Annotated[Path, Flag(metavar="DIR", default="$TMPDIR or /tmp")] = Field(
        default_factory=lambda: Path(tempfile.gettempdir()), description="where the copies of the workspace are made"
    )

    @field_validator("task", "workspace", "job", "out", "scratch")
    @classmethod
    def _expanded(cls, path: Path | None) -> Path | None:
        """Expand a `~`, because a shell leaves it alone in `--out=~/runs`."""
        if path is None:
            return None
        try:
            return path.expanduser()
        except RuntimeError as error:
            raise ValueError(f"{path} is in the home directory of a user who does not exist on this machine") from error

    @model_validator(mode="after")
    def _fit_together(self) -> "RolloutOptions":
        if self.eval and self.steps is not None:
            raise ValueError("--eval cannot be combined with --steps: evaluation episodes lead to no steps")
        return self


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to play episodes."""

    options: RolloutOptions
    tasks: list[AgentTask]
    agent: CommandTemplate
    reward: CommandTemplate | None  # None if the tasks have their own tests
    sandbox: CommandTemplate | None
    preset: HarnessPreset | None
    dialects: tuple[ApiDialect, ...]
    workspace: Path | None

    @property
    def limits(self) -> EpisodeLimits:
        return EpisodeLimits(turns_max=self.options.turns_max, tokens_max=self.options.tokens_max)

    @property
    def epochs(self) -> int | None:
        return self.options.epochs or (None if self.options.steps else 1)

    def timeout_s(self, task: AgentTask) -> float:
        """Return an agent's time limit: the task's own if it has one, unless the command line gives a lower one."""
        given, own = self.options.timeout_s, task.package.timeout_s if task.package is not None else None
        if own is None:
            return given
        return min(own, given) if "timeout_s" in self.options.model_fields_set else own

    def reward_timeout_s(self, task: AgentTask) -> float:
        """Return how long the judge of a task may take."""
        return self.options.reward_timeout_s if task.package is None else task.package.reward_timeout_s

    def episode_s(self, task: AgentTask) -> float:
        """Return how long an episode may last, including the time needed to stop the agent and report the outcome."""
        return self.timeout_s(task) + self.reward_timeout_s(task) + 600.0


def check_url(url: str) -> None:
    """Raise `Refused` if no client can use this address."""
    try:
        address(url, None)
    except ValueError as error:
        raise Refused(Code.BAD_CONFIG, f"--url: {error}") from error


def plan_of(options: RolloutOptions) -> RolloutPlan:
    """Read and check everything that the command line names. Raises `Refused`."""
    check_url(options.url)
    check_scratch(options.scratch)
    if options.out is not None:
        check_out(options.out)
    tasks = _tasks(options)
    typed = parse_command(options.agent, "--agent")
    preset = preset_of(typed.words[0], options.preset)
    if preset is not None and options.dialect:
        raise Refused(
            Code.BAD_CONFIG,
            f"--dialect is for agents without a preset, but {typed.words[0]} has one: add --preset none",
        )
    plan = RolloutPlan(
        options=options,
        tasks=tasks,
        agent=preset.command(typed) if preset is not None else typed,
        reward=None if tasks[0].package is not None else parse_command(options.reward, "--reward"),
        sandbox=parse_command(options.sandbox, "--sandbox") if options.sandbox else None,
        preset=preset,
        dialects=(preset.dialect,) if preset is not None else options.dialect or tuple(ApiDialect),
        workspace=check_workspace(options.workspace, options.scratch, options.out) if options.workspace else None,
    )
    if preset is not None and "prompt" in typed.fields():
        preset.check_prompts(tasks)
    for template in (typed, plan.reward, plan.sandbox):
        if template is not None:
            check_fields(template, tasks)
    if tasks[0].package is not None:
        _check_agent_of_packages(plan.agent, tasks)
        return plan
    for template in (plan.sandbox,) if plan.sandbox is not None else (plan.agent, plan.reward):
        if template is not None:
            check_program(template, plan.workspace)
    return plan


def _check_agent_of_packages(agent: CommandTemplate, tasks: Sequence[AgentTask]) -> None:
    """Raise `Refused` if a task's sandbox hides the agent's program. The program may be a file of the task."""
    program = agent.words[0]
    if "/" not in program:
        check_program(agent, None)
    for task in tasks:
        if os.path.isabs(program) and task.package is not None and hides(task.package, Path(program)):
            raise Refused(
                Code.BAD_CONFIG,
                f"--agent: the sandbox of task {task.task_id} hides {program}, because it has other folders in place "
                f"of /tmp, /run, {task.package.workdir} and the folder of --task: put the program elsewhere",
            )


def _tasks(options: RolloutOptions) -> list[AgentTask]:
    """Read the tasks from a file or a folder. Raises `Refused` if that fails, or if the flags do not fit that
    choice."""
    if not options.task.is_dir():
        if not options.reward:
            raise Refused(Code.BAD_CONFIG, "--reward is missing: only a folder of tasks has tests that judge them")
        return read_tasks(options.task)
    for flag, given in (("reward", options.reward), ("workspace", options.workspace), ("sandbox", options.sandbox)):
        if given:
            raise Refused(
                Code.BAD_CONFIG,
                f"--{flag} cannot be combined with a folder of tasks, which have their own: leave it out",
            )
    tasks = read_task_folders(options.task)
    for task in tasks[:1]:
        if task.package is not None:
            check_sandbox(task.package, options.scratch)
    return tasks


def shortage_of_tasks(plan: RolloutPlan, pool: PoolInformation) -> str:
    """Return why the tasks alone cannot complete a batch of the job, or "" if they can."""
    wanted = pool.completed_task_target
    if pool.sample_collection_method not in METHODS_OF_TASKS or len(plan.tasks) >= wanted:
        return ""
    return (
        f"the job's batches have {wanted} different tasks (collection.batch_size), but --task has {len(plan.tasks)}, "
        "so the trainer makes no step unless other clients play more tasks"
    )
