"""Announces on the log each attempt to rebuild a model, to limit the attempts that trainers do not survive (R17)."""

from collections.abc import Awaitable, Callable

from bombus.errors import EngineFault
from bombus.hive.operations.state import ClientModel

Say = Callable[[int, bool], Awaitable[None]]  # takes an operation's number (or 0), and whether the attempt is over


class NoneSurvived(EngineFault):
    """Raised instead of retrying a rebuild that would probably end another trainer."""


class Rebuild:
    """One trainer's attempt to rebuild a model.

    The first trainer only announces that it begins, and later that it has survived. If it does not survive, later
    trainers announce each operation before they re-execute it. Trainers that were killed for unrelated reasons
    therefore do not add up, and the announcements show which operation several trainers did not survive.
    """

    def __init__(self, model: ClientModel, trainer_epoch: int, executions_max: int, say: Say | None) -> None:
        """`say` is None if this trainer has already survived an attempt; nothing is announced then."""
        self._name = model.name
        self._is_in_doubt = model.rebuilding_by not in (0, trainer_epoch)
        self._deadly = model.deadly(executions_max, trainer_epoch)
        self._is_rescue_deadly = bool(model.deadly(2 * executions_max, trainer_epoch))
        self._executions_max = executions_max
        self._say = say
        self._has_begun = False

    async def rescued_from(self) -> int:
        """Return the number of the operation that no trainer survives, or 0 if there is none. A checkpoint saved after
        that operation can be loaded instead.

        Raises `NoneSurvived` if trainers did not survive loading such a checkpoint either.
        """
        if self._is_rescue_deadly:
            raise self.none_survived()
        if self._deadly and self._say is not None:
            await self._say(self._deadly, False)
        return self._deadly

    def none_survived(self) -> NoneSurvived:
        return NoneSurvived(
            f"{self._executions_max} trainers ended while they rebuilt it, at operation {self._deadly}, so "
            "this is not retried. Check the kernel log for the out-of-memory killer and the ends of the trainers' "
            "logs, then run `bombus resume`; or end the model and create it from a checkpoint"
        )

    async def begins(self, number: int) -> None:
        """Announce that operation `number` is about to be re-executed, if that may end this trainer.

        Also used before loading the recovery checkpoint that was written after that operation.
        """
        if self._say is None:
            return
        if self._is_in_doubt:
            await self._say(number, False)
        elif not self._has_begun:
            await self._say(0, False)
        self._has_begun = True

    async def over(self) -> None:
        """Announce that this trainer has survived the attempt."""
        if self._say is not None and (self._has_begun or self._is_in_doubt):
            await self._say(0, True)
