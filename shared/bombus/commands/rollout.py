"""`bombus rollout`: plays episodes with any command, each in a copy of a workspace; another command rewards them."""

import argparse
import asyncio
from pathlib import Path

from bombus import task_groups
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.errors import BombusError, Code, Refused
from bombus.machine.process import TERMINATED, cancel_at_signals
from bombus.rollout.display import ProgressDisplay
from bombus.rollout.plan import RolloutOptions, RolloutPlan, plan_of, shortage_of_tasks
from bombus.rollout.run import RolloutRun
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.errors import EngineOffline
from bombus.sdk.job import Job
from bombus.terminal import complain, say

EPILOG = """\
Each episode gets a copy of the workspace. The agent runs there with its own model: $OPENAI_BASE_URL,
$OPENAI_API_KEY, $ANTHROPIC_BASE_URL and the like are set, and $BOMBUS_BASE_URL, $BOMBUS_API_KEY, $BOMBUS_MODEL,
$BOMBUS_PROMPT, $BOMBUS_TASK (JSON) and $BOMBUS_WORKSPACE. Then the reward command runs in the same folder; it finds
what the agent printed in the file $BOMBUS_OUTPUT. docs/rollout.md has the rest.

example:
  bombus rollout --task tasks.jsonl --workspace ./repo --agent 'claude -p {prompt}' \\
    --reward "$PWD/check.sh" -n 8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "--task",
        type=Path,
        required=True,
        metavar="PATH",
        help="a file with a JSON object per line: `prompt`, optionally `task_id`, and fields of your own; or a folder "
        "of tasks in Harbor's format, which have their own files, tests and limits",
    )
    parser.add_argument(
        "--agent",
        required=True,
        metavar="CMD",
        help="the agent. {prompt}, {task_id}, {workspace} and other fields of the task become single arguments; "
        "no shell is used unless you write sh -c",
    )
    parser.add_argument(
        "--reward",
        default="",
        metavar="CMD",
        help="run after the agent: if the last line that it prints is a number, that is the reward, whatever the exit "
        "code; otherwise 1 for exit code 0, and 0 for any other. It gets the same fields. Not for a folder of tasks, "
        "whose own tests decide",
    )
    parser.add_argument(
        "-n",
        type=int,
        default=None,
        metavar="N",
        help="episodes of each task, which are compared with each other (default: the job's num_repeat; 1 with --eval)",
    )
    add_settings_arguments(parser, RolloutOptions)


def run(arguments: argparse.Namespace) -> int:
    plan = plan_of(settings_from(RolloutOptions, arguments, flags={"n": "-n"}))
    job = Job.build_job_from_yaml(plan.options.job) if plan.options.job is not None else None
    try:
        return task_groups.run(_roll_out(plan, job))
    except EngineOffline as error:
        complain(f"bombus rollout: {error}", "Start a job first, or pass one with --job.")
    except (BombusError, TimeoutError) as error:
        complain(*f"bombus rollout: {error}".split("\n"))
    except asyncio.CancelledError:
        return TERMINATED
    return 1


async def _roll_out(plan: RolloutPlan, job: Job | None) -> int:
    options = plan.options
    cancel_at_signals()
    async with AsyncSwarmClient(options.url, verbose=False, engine=options.engine or None) as client:
        if job is not None:
            say(
                f"starting the job of {options.job}, unless it is running; this takes as long as loading its model",
                flush=True,
            )
            await client.auto_sync_train_config_and_start_engine(job)
        display = ProgressDisplay()
        rollout = RolloutRun(plan, client, await _repeat(plan, client), display)
        if before := rollout.done_before:
            say(f"continuing after {before} episodes in --out {options.out}; name another folder to start over")
        try:
            await rollout.run()
        finally:
            display.close(rollout.tally)
    return 0 if rollout.tally.rewards or rollout.tally.total == 0 else 1


async def _repeat(plan: RolloutPlan, client: AsyncSwarmClient) -> int:
    """Return how many episodes each task gets. Print a warning if that number, or the number of tasks, does not fit the
    job.

    Raises `Refused` if the given number of steps would never be reached.
    """
    given = plan.options.n
    if plan.options.eval:
        return given or 1
    pool = await client.get_rollout_stat()
    if shortage := shortage_of_tasks(plan, pool):
        if plan.options.steps is not None:
            raise Refused(Code.BAD_CONFIG, f"{shortage}; with other clients, give --epochs instead of --steps")
        complain(f"bombus rollout: {shortage}")
    wanted = pool.task_expected_num_repeat
    if given is not None and wanted and given % wanted:
        complain(
            f"bombus rollout: the job compares groups of {wanted} episodes (rollout.num_repeat), but -n {given} does "
            "not fill them"
        )
    return given or max(1, wanted)
