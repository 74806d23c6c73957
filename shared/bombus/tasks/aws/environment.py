"""An AWS account in a simulator. The model works on it with command lines, and the reward depends on the account's end
state."""

import msgspec

from bombus.environments.backends.kinds import Backend
from bombus.environments.backends.process import ministack
from bombus.environments.kinds import ResetFailed, SandboxLost
from bombus.environments.plain.marks import metric, reward, success
from bombus.sdk.types import Task
from bombus.tasks.aws.catalogue import ENDPOINT, TASKS, AwsTask, StateCheck
from bombus.tasks.aws.commands import words_of_command
from bombus.tasks.aws.console import AwsConsole, CommandKilled
from bombus.tasks.aws.line import CommandRefused

PARTIAL = 0.8  # factor on the fraction of the checks achieved, unless all are achieved
FAILED = "(the command failed with exit code {0})"
INSTRUCTION = (
    "You administer an AWS account. Carry out the task with the tool `aws`, which takes one command line of the AWS "
    "command line interface at a time, such as: aws s3 ls. There is no shell, and there are no files: write values "
    "into the command. The account's number is 000000000000, the region us-east-1. When everything is done, say so."
)


class AwsEnvironment:
    """One account. If no `backend` is given, the environment starts its own simulator.

    The reward is 1 if all checks succeed, 0 if something that was right at the beginning was broken, and otherwise 0.8
    times the fraction of the checks that have been achieved.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self._backend = backend
        self._own: Backend | None = None
        self._console: AwsConsole | None = None
        self._task = TASKS[0]
        self._held: list[bool] = []
        self._holds: list[bool] | None = None
        self._was: list[tuple[int, str]] = []
        self._is_broken = False
        self._failed = 0

    async def reset(self, task: Task) -> list[dict[str, str]]:
        await self.close()
        self._task, self._holds, self._failed = task_of(task), None, 0
        backend = self._backend
        if backend is None:
            backend = self._own = ministack(0, 0)
            await backend.start()
        self._console = AwsConsole(backend.address)
        await self._console.start()
        for command in self._task.before:
            code, text = await self._console.run(self._words(command))
            if code:
                raise ResetFailed(f"{self._task.name}: aws {command} failed: {text[:200]}")
        self._was, self._is_broken = await self._unchanged(), False
        self._held = await self._checked()
        await self._check_simulator()
        if all(self._held):
            raise ResetFailed(f"the task {self._task.name} is already done at its start: was the simulator scrubbed?")
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self._task.prompt}]

    async def aws(self, command: str) -> str:
        """Carry out one command line of the AWS command line interface.

        Args:
            command: the whole command line, such as: aws s3 ls
        """
        console = self._console_there()
        self._holds = None
        try:
            code, text = await console.run(words_of_command(command))
        except CommandRefused:
            self._failed += 1
            raise
        except CommandKilled as error:  # caused by the model's command, not by the simulator
            self._failed += 1
            return f"({error}: it was killed)"
        self._failed += code != 0
        return "\n".join(filter(None, (text, FAILED.format(code) if code else ""))) or "(done, without output)"

    def gold(self, task: Task) -> list[object]:
        """Return the calls that solve a task, followed by the final answer."""
        lines = [self._filled(line) for line in task_of(task).gold]
        return [*(("aws", {"command": f"aws {line}"}) for line in lines), "Done."]

    @reward
    async def progress(self) -> float:
        """Return the reward for the account's current state."""
        holds = await self._now()
        if await self.is_done():
            return 1.0
        if self._is_broken or any(before and not now for before, now in zip(self._held, holds)):
            return 0.0
        wanted = [now for before, now in zip(self._held, holds) if not before]
        return PARTIAL * sum(wanted) / len(wanted)

    @success
    async def is_done(self) -> bool:
        """Return whether all checks succeed and everything that must not change is unchanged."""
        return all(await self._now()) and not self._is_broken

    @metric
    def failed_commands(self) -> float:
        """Return how many commands failed or were refused."""
        return float(self._failed)

    async def close(self) -> None:
        console, self._console = self._console, None
        own, self._own = self._own, None
        try:
            if console is not None:
                await console.close()
        finally:
            if own is not None:
                await own.stop()

    def _console_there(self) -> AwsConsole:
        if self._console is None:
            raise ResetFailed("the account was not set up")
        return self._console

    async def _now(self) -> list[bool]:
        if self._holds is None:
            self._holds = await self._checked()
            self._is_broken = await self._unchanged() != self._was
            await self._check_simulator()
        return self._holds

    async def _checked(self) -> list[bool]:
        return [await self._is_so(check) for check in self._task.checks]

    async def _unchanged(self) -> list[tuple[int, str]]:
        return [await self._console_there().run(self._words(command)) for command in self._task.unchanged]

    async def _check_simulator(self) -> None:
        """Raise `SandboxLost` if the simulator is gone, because the model is then not to blame for the failure."""
        backend = self._backend or self._own
        if backend is None or not await backend.is_healthy():
            self._holds = None
            raise SandboxLost("the simulator of this account no longer answers")

    async def _is_so(self, check: StateCheck) -> bool:
        code, text = await self._console_there().run(self._words(check.command))
        if code:
            return False
        try:
            found = msgspec.json.decode(text) if text else None
        except msgspec.MsgspecError:
            return False
        return found == check.expected and (check.alone is None or await self._is_so(check.alone))

    def _words(self, command: str) -> list[str]:
        return words_of_command(f"aws {self._filled(command)}")

    def _filled(self, command: str) -> str:
        return command.replace(ENDPOINT, self._console_there().address)


def task_of(task: Task) -> AwsTask:
    """Return the AWS task of a drawn task. Raises `ResetFailed` if there is none."""
    name = task.metadata.get("aws")
    for each in TASKS:
        if each.name == name:
            return each
    raise ResetFailed(f"metadata['aws'] is {name!r}: it must be the name of a task of `aws`")
