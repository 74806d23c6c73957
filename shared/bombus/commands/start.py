"""`bombus start`: runs a coding agent in this terminal on a hive's model, and asks you for the reward at the end."""

import argparse
import tempfile
import time
from math import nan
from pathlib import Path

from bombus.errors import BombusError, Code, Refused
from bombus.hive.episodes import REWARD_MAX
from bombus.rollout.commands import check_utf8
from bombus.rollout.plan import URL, check_url
from bombus.rollout.presets import PRESETS
from bombus.rollout.reward import is_reward
from bombus.rollout.session import HarnessSession, open_session, run_harness
from bombus.rollout.tasks import TASK_ID_CHARACTERS
from bombus.sdk.client import SwarmClient
from bombus.sdk.types import Task, WorkflowOutput
from bombus.terminal import complain, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The harness runs in the workspace itself, with its own configuration. It is one episode; at its end you "
        "are asked for the reward."
    )
    parser.add_argument("harness", choices=PRESETS, help="the harness to start")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARG", help="everything after the harness is passed to it"
    )
    parser.add_argument(
        "--workspace", type=Path, default=Path(), metavar="DIR", help="where the harness works (default: this folder)"
    )
    parser.add_argument(
        "--url",
        default=URL,
        help="the hive; its key comes from $BOMBUS_CLIENT_KEY or $BOMBUS_ADMIN_KEY (default: %(default)s)",
    )
    parser.add_argument(
        "--engine", default="", metavar="NAME", help="the engine that plays (default: the hive's first)"
    )
    parser.add_argument(
        "--task-id",
        default="",
        metavar="ID",
        help="sessions of one task are compared with each other (default: a separate task)",
    )
    parser.add_argument("--eval", action="store_true", help="an evaluation episode, which is not trained on")


def run(arguments: argparse.Namespace) -> int:
    check_url(arguments.url)
    workspace = arguments.workspace.expanduser().resolve()
    if not workspace.is_dir():
        raise Refused(Code.BAD_CONFIG, f"--workspace {arguments.workspace} is not a folder")
    check_utf8(arguments.task_id, "--task-id")
    if len(arguments.task_id) > TASK_ID_CHARACTERS:
        raise Refused(
            Code.BAD_CONFIG, f"--task-id has over {TASK_ID_CHARACTERS} characters, which the hive does not accept"
        )
    session = HarnessSession(
        harness=arguments.harness,
        arguments=arguments.arguments,
        workspace=workspace,
        kind="eval" if arguments.eval else "train",
    )
    task = Task(task_id=arguments.task_id or time.strftime("session-%Y%m%d-%H%M%S"))
    try:
        with SwarmClient(arguments.url, verbose=False, engine=arguments.engine or None) as client:
            return _start(session, client, task)
    except (BombusError, TimeoutError) as error:
        complain(f"bombus start: {error}")
        return 1


def _start(session: HarnessSession, client: SwarmClient, task: Task) -> int:
    say("waiting for an episode", flush=True)
    with open_session(client, session.kind) as claimed:
        with tempfile.TemporaryDirectory(prefix="bombus-start-", ignore_cleanup_errors=True) as scratch:
            exit_code = run_harness(session, claimed, Path(scratch))
        used = client.episode_usage(claimed.episode_uuid)
        if used is None:
            complain("bombus start: the hive has ended the episode, so it gets no reward")
            return 1
        say(f"{used.calls} model calls, {used.completion_tokens} tokens sampled")
        reward = _reward()
        if reward is None:
            client.abort_episode(claimed.episode_uuid, detail="the session got no reward")
            say("the episode was aborted")
        else:
            metadata = {"agent": session.harness, "exit_code": exit_code}
            client.end_episode(task, claimed.episode_uuid, WorkflowOutput(reward=reward, metadata=metadata))
            say(f"the episode ended with the reward {reward:g}")
    return 0


def _reward() -> float | None:
    """Ask for the reward. Return None if the episode should be aborted."""
    while True:
        try:
            typed = input("reward (a number; leave empty to abort the episode): ").strip()
        except EOFError:
            return None
        if not typed:
            return None
        try:
            reward = float(typed)
        except ValueError:
            reward = nan
        if is_reward(reward):
            return reward
        say(f"{typed} is not a number whose absolute value is at most {REWARD_MAX:.0e}")
