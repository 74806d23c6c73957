"""Small jobs with files in a sandbox: `shell`.

Each job is generated from a seed, and the reward depends on the resulting files.
"""

import hashlib
import random
import shlex
from collections.abc import Callable, Mapping

import msgspec

from bombus.environments.backends.shell import COMMAND_S, ShellSandbox
from bombus.environments.budgets import RolloutBudgets
from bombus.environments.kinds import ResetFailed, SandboxLost
from bombus.environments.plain.marks import metric, reward, success
from bombus.sdk.types import Task
from bombus.tasks.kinds import NoOptions, TaskDraw, TaskFamily, TaskSplit, options_of

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty", "knoll", "larch")
INSTRUCTION = (
    "You work in the folder /work of a Linux machine without a network. Carry out the task with the tool `run`, which "
    "runs one line of shell at a time. Each begins in /work. When everything is done, say so."
)


class ShellJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job: its prompt, a command line that prepares its folder, and one that solves it.

    At the end, the files in `left` must have these contents. The file `answer` must contain `expected`, apart from
    surrounding whitespace; if there is no `answer`, there must be no files other than those in `left`.
    """

    prompt: str
    before: str
    gold: str
    left: dict[str, str]
    answer: str = ""
    expected: str = ""

    def check(self) -> str:
        """Return a shell command that prints the resulting files.

        All files except `answer` are printed as digests, since otherwise a file's name could imitate a file's content.
        """
        if not self.answer:
            return "sha256sum -- *"
        return f"sha256sum -- {shlex.join(sorted(self.left))} && cat -- {self.answer}"

    def is_right(self, output: str) -> bool:
        """Return whether the output of `check` is correct."""
        *digests, rest = output.split("\n", len(self.left))
        expected = [f"{hashlib.sha256(self.left[name].encode()).hexdigest()}  {name}" for name in sorted(self.left)]
        return (digests, rest.strip()) == (expected, self.expected)


def _files(contents: Mapping[str, str]) -> str:
    """Return a shell command that writes these files."""
    return "; ".join(f"printf %s {shlex.quote(text)} > {shlex.quote(name)}" for name, text in contents.items())


def _count_lines(rng: random.Random) -> ShellJob:
    word, *others = rng.sample(WORDS, 4)
    lines = [rng.choice((word, *others)) for _ in range(rng.randint(20, 60))]
    files = {"log.txt": "".join(f"{line}\n" for line in lines)}
    return ShellJob(
        prompt=f"Count the lines of log.txt that are exactly {word}, and write the number, alone, to answer.txt. "
        "Change no other file.",
        before=_files(files),
        gold=f"grep -cx {word} log.txt > answer.txt || true",
        left=files,
        answer="answer.txt",
        expected=str(lines.count(word)),
    )


def _sum_column(rng: random.Random) -> ShellJob:
    names = [rng.choice(WORDS) for _ in range(rng.randint(8, 30))]
    rows = [(rng.randint(1, 500), rng.randint(1, 500)) for _ in names]
    column = rng.choice((0, 1))
    name = ("count", "price")[column]
    files = {"table.csv": "name,count,price\n" + "".join(f"{n},{a},{b}\n" for n, (a, b) in zip(names, rows))}
    return ShellJob(
        prompt=f"Add up the column {name} of table.csv, and write the sum, alone, to answer.txt. Change no other file.",
        before=_files(files),
        gold=f"awk -F, 'NR > 1 {{ sum += ${column + 2} }} END {{ print sum }}' table.csv > answer.txt",
        left=files,
        answer="answer.txt",
        expected=str(sum(row[column] for row in rows)),
    )


def _rename(rng: random.Random) -> ShellJob:
    kept, *renamed = rng.sample(WORDS, rng.randint(4, 7))
    old, new = rng.sample(("txt", "md", "rst", "log"), 2)
    files = {f"{kept}.sh": kept, **{f"{name}.{old}": name for name in renamed}}
    return ShellJob(
        prompt=f"Rename every file that ends with .{old} so that it ends with .{new}. Leave other files as they are.",
        before=_files(files),
        gold=f'for file in *.{old}; do mv "$file" "${{file%.{old}}}.{new}"; done',
        left={f"{kept}.sh": kept, **{f"{name}.{new}": name for name in renamed}},
    )


def _largest(rng: random.Random) -> ShellJob:
    names = rng.sample(WORDS, rng.randint(3, 6))
    sizes = dict(zip(names, rng.sample(range(10, 400), len(names))))
    files = {f"data/{name}": "x" * size for name, size in sizes.items()}
    return ShellJob(
        prompt="Write the name of the largest file of the folder data, without its path, to answer.txt. Change no "
        "other file.",
        before="mkdir data; " + _files(files),
        gold="ls -S data | head -n 1 > answer.txt",
        left=files,
        answer="answer.txt",
        expected=max(sizes, key=lambda name: sizes[name]),
    )


def _remove_empty(rng: random.Random) -> ShellJob:
    names = rng.sample(WORDS, 6)
    empty = set(rng.sample(names, 3))
    return ShellJob(
        prompt="Delete the files that are empty. Keep all others.",
        before=_files({name: "" if name in empty else name for name in names}),
        gold="find . -type f -empty -delete",
        left={name: name for name in names if name not in empty},
    )


def _unique(rng: random.Random) -> ShellJob:
    words = [rng.choice(WORDS) for _ in range(rng.randint(15, 40))]
    files = {"words.txt": "".join(f"{word}\n" for word in words)}
    return ShellJob(
        prompt="Write each different line of words.txt once to sorted.txt, in alphabetical order. Change no "
        "other file.",
        before=_files(files),
        gold="LC_ALL=C sort -u words.txt > sorted.txt",
        left=files,
        answer="sorted.txt",
        expected="\n".join(sorted(set(words))),
    )


JOBS: dict[str, Callable[[random.Random], ShellJob]] = {
    "count-lines": _count_lines,
    "sum-column": _sum_column,
    "rename": _rename,
    "largest": _largest,
    "remove-empty": _remove_empty,
    "unique": _unique,
}


def job_of(task: Task) -> ShellJob:
    """Return the job of a drawn task. Raises `ResetFailed` if the task has none."""
    kind = task.metadata.get("job")
    if kind not in JOBS:
        raise ResetFailed(f"metadata['job'] is {kind!r}: it must be one of {', '.join(JOBS)}")
    return JOBS[kind](random.Random(task.metadata.get("seed")))


class ShellEnvironment:
    """A folder in a sandbox. The environment creates the sandbox itself unless a `backend` is given. The reward is 1 if
    the job is done."""

    def __init__(self, backend: ShellSandbox | None = None) -> None:
        self._backend = backend
        self._own: ShellSandbox | None = None
        self._job = ShellJob(prompt="", before="", gold="", left={})
        self._failed = 0

    async def reset(self, task: Task) -> list[dict[str, str]]:
        await self.close()
        self._job, self._failed = job_of(task), 0
        if self._backend is None:
            self._own = ShellSandbox()
            await self._own.start()
        made = await self._sandbox().run(self._job.before)
        if made.code:
            raise ResetFailed(f"the folder could not be made: {made.output[:200]}")
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self._job.prompt}]

    async def run(self, command: str) -> str:
        """Run a line of shell in /work.

        Args:
            command: the line, such as: ls -l
        """
        result = await self._sandbox().run(command, COMMAND_S)
        self._failed += result.code != 0
        notes = [
            "(the output was cut)" if result.cut else "",
            f"(it did not end within {COMMAND_S:.0f} s)" if result.timed_out else "",
            f"(exit code {result.code})" if result.code and not result.timed_out else "",
        ]
        return "\n".join(filter(None, (result.output.strip(), *notes))) or "(done, without output)"

    def gold(self, task: Task) -> list[object]:
        """Return the call that does the job, followed by the final answer."""
        return [("run", {"command": job_of(task).gold}), "Done."]

    @reward
    async def is_left_so(self) -> float:
        """Return whether the folder is as the job demands."""
        return float(await self.is_done())

    @success
    async def is_done(self) -> bool:
        """Return whether the folder is as the job demands."""
        result = await self._sandbox().run(self._job.check())
        if result.code and (await self._sandbox().run("true")).code:
            raise SandboxLost(f"the sandbox no longer runs commands: {result.output[:200]}")
        return result.code == 0 and self._job.is_right(result.output)

    @metric
    def failed_commands(self) -> float:
        """Return how many commands had a nonzero exit code."""
        return float(self._failed)

    async def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await own.stop()

    def _sandbox(self) -> ShellSandbox:
        found = self._backend or self._own
        if found is None:
            raise ResetFailed("the sandbox was not set up")
        return found


class ShellTasks:
    """Jobs of all kinds, in rotation."""

    name = "shell"
    budgets = RolloutBudgets(turns_max=8, tokens_max=8192)

    def draw(self, draw: TaskDraw) -> list[Task]:
        kinds = list(JOBS)
        return [self._task(kinds[index % len(kinds)], index, draw) for index in range(draw.size)]

    def _task(self, kind: str, index: int, draw: TaskDraw) -> Task:
        split = TaskSplit(draw.split)
        task = Task(
            task_id=f"shell/{split}/{draw.seed}/{index}",
            env_type=self.name,
            metadata={"job": kind, "seed": f"{split}/{draw.seed}/{index}"},
        )
        return task.model_copy(update={"main_query": job_of(task).prompt})

    def environment(self) -> object:
        return ShellEnvironment()

    def figures(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        pass


def _open(_: str, given: Mapping[str, str]) -> ShellTasks:
    options_of(NoOptions, "shell", given)
    return ShellTasks()


FAMILY = TaskFamily(
    name="shell",
    about="small jobs with files, in a sandbox without a network (Linux)",
    open=_open,
    has_names=False,
)
