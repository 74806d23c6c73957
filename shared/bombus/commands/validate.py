"""`bombus env validate`: plays an environment class without a model and reports its faults before it is used in
training."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bombus import task_groups
from bombus.environments.loading import load_class, read_environment_tasks
from bombus.environments.plain.description import WrongClass, describe
from bombus.environments.plain.validation import CheckedTask, ClassValidation
from bombus.sdk.types import Task
from bombus.terminal import complain, say

TASKS_MAX = 20
CHECKS = ("plays", "gold", "range", "determinism", "isolation", "leaks")
EPILOG = """\
Each task is played without a model: once with no calls at all, and once with the calls of `gold(self, task)`, if the
class has it. `gold` returns a list of ("tool", {"argument": value}), with the answer as text at its end. For a class
with `play` it returns a list of the model's answers. The task is then played again, once next to another instance of
it, and everything left behind after `close` is reported.

example:
  bombus env validate my_env:Counter --task tasks.jsonl --gold
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "name", metavar="module:Class", help="the class, such as my_env:Counter for my_env.py in this folder"
    )
    parser.add_argument(
        "--task",
        type=Path,
        metavar="FILE",
        help=f"tasks, a JSON object per line; the first {TASKS_MAX} are played (default: one empty task)",
    )
    parser.add_argument("--gold", action="store_true", help="fail a class without a gold solution")


def run(arguments: argparse.Namespace) -> int:
    kind = load_class(arguments.name)
    tasks = read_environment_tasks(arguments.task) if arguments.task is not None else [Task(task_id="empty")]
    try:
        description = describe(kind)
    except WrongClass as error:
        complain(f"{arguments.name} cannot be used as an environment:", *(f"  {problem}" for problem in error.problems))
        return 1
    say(
        f"{arguments.name}: tools {len(description.tools)}, rewards {len(description.rewards)}, metrics "
        f"{len(description.metrics)}, tasks {min(len(tasks), TASKS_MAX)} of {len(tasks)}"
    )
    validation = ClassValidation(kind, description, needs_gold=arguments.gold)
    found = task_groups.run(_checked(validation, tasks[:TASKS_MAX]))
    for check in CHECKS:
        rows = [row for _, checked in found for row in checked if row.check == check]
        if rows:
            say(_row(check, rows))
    problems = [f"{task}: {each}" for task, checked in found for row in checked for each in row.problems]
    warnings = [f"warning: {task}: {row.warning}" for task, checked in found for row in checked if row.warning]
    complain(*problems, *warnings)
    return 1 if problems else 0


async def _checked(validation: ClassValidation, tasks: Sequence[Task]) -> list[tuple[str, list[CheckedTask]]]:
    """Return the findings for each task. Tasks with the same id are told apart by their position in the file."""
    shared = Counter(task.task_id for task in tasks)
    return [
        (
            f"{task.task_id} (task {place} of the file)" if shared[task.task_id] > 1 else task.task_id,
            await validation.check(task),
        )
        for place, task in enumerate(tasks, 1)
    ]


def _row(check: str, rows: Sequence[CheckedTask]) -> str:
    failed = sum(bool(row.problems) for row in rows)
    skipped = [row for row in rows if row.skipped]
    if failed:
        how = f"FAILED  for {failed} of {len(rows)} tasks"
    elif len(skipped) == len(rows):
        how = f"skipped {skipped[0].skipped}"
    else:
        detail = next((row.detail for row in rows if row.detail), "")
        how = f"ok      {detail}"
    return f"  {check:<12} {how}".rstrip()
