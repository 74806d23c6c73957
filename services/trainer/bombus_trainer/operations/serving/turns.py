"""Chooses the next operation: models with waiting operations take turns, and operations of a model run in order."""

from collections.abc import Iterable

from bombus.hive.operations.state import ClientModel, Queued


class Turns:
    """Remembers when each model had its last turn."""

    def __init__(self) -> None:
        self._count = 0
        self._taken: dict[str, int] = {}

    def take(self, models: Iterable[ClientModel]) -> tuple[ClientModel, Queued] | None:
        """Return the next operation of the open `models`, with its model, or None if no operation is waiting.

        The model whose last turn was longest ago comes next. Models that have had no turn come before all others,
        starting with the one whose operation has waited longest.
        """
        there = list(models)
        self._taken = {model.name: self._taken[model.name] for model in there if model.name in self._taken}
        waiting = [(model, first) for model in there if (first := first_waiting(model)) is not None]
        if not waiting:
            return None
        model, queued = min(waiting, key=lambda each: (self._taken.get(each[0].name, 0), each[1].arrival))
        self._count += 1
        self._taken[model.name] = self._count
        return model, queued


def first_waiting(model: ClientModel) -> Queued | None:
    """Return a model's next waiting operation, or None if none is waiting."""
    if not model.waiting:
        return None
    return next((each for each in model.operations.values() if each.waits), None)
