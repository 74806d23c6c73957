"""The training operations of an engine: each gradient of a training client is used in a step, dropped, or waits."""

from collections import Counter
from collections.abc import Callable

from bombus.hive import events as ev
from bombus.hive.operations.state import Queued
from bombus.hive.state import EngineState

TRAINING_OPERATIONS = ("forward_backward", "optim_step")


class _Model:
    """A model's training operations: the waiting ones by number, the numbers of the completed ones, and how many
    gradients are waiting for an optimizer step."""

    __slots__ = ("accumulated", "completed", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[str, str]] = {}  # the kind and the key of each
        self.completed: set[int] = set()
        self.accumulated = 0


class Operations:
    """Counts what became of operations in `counts`, and reports contradictions to `differ`."""

    def __init__(self, counts: Counter[str], differ: Callable[[str], None]) -> None:
        self._counts = counts
        self._differ = differ
        self._models: dict[str, _Model] = {}

    def take_over(self, engine: EngineState) -> None:
        """Begin with the operations that were waiting when a log was compacted."""
        for model in engine.clients.open_models:
            waiting = [each for each in model.operations.values() if each.waits and _is_training(each)]
            self._models.setdefault(model.name, _Model()).waiting = {
                each.number: (each.op, each.key) for each in waiting
            }

    def accepted(self, event: ev.OperationAccepted) -> None:
        if not _is_training(event):
            return
        model = self._models.setdefault(event.model, _Model())
        if event.number in model.waiting or event.number in model.completed:
            self._differ(f"operation {event.number} of model {event.model} was accepted twice")
        self._counts[f"{event.op} accepted"] += 1
        model.waiting[event.number] = event.op, event.key

    def executed(self, event: ev.OperationCompleted) -> None:
        model, name = self._models.get(event.model), f"operation {event.number} of model {event.model}"
        if model is None:
            return
        if event.number in model.completed:
            self._differ(f"{name} was completed twice")
        if (accepted := model.waiting.pop(event.number, None)) is None:
            return  # not a training operation, or one from before this log
        if accepted != (event.op, event.key):
            why = f"was accepted as {' '.join(accepted)}, but completed as {event.op} {event.key}"
            self._differ(f"{name} {why}")
        model.completed.add(event.number)
        if event.failed:
            self._counts[f"{event.op} failed"] += 1
        elif event.op == "forward_backward":
            model.accumulated += 1
        else:
            self._counts["optim_step executed"] += 1
            self._counts["forward_backward used in a step"] += model.accumulated
            model.accumulated = 0

    def close(self, name: str) -> None:
        """Count what a model leaves as dropped: it has ended."""
        if (model := self._models.pop(name, None)) is not None:
            self._counts["forward_backward dropped: no step followed"] += model.accumulated
            for op, _ in model.waiting.values():
                self._counts[f"{op} dropped: model ended"] += 1

    def close_all(self) -> None:
        for name in list(self._models):
            self.close(name)

    def count_waiting(self) -> None:
        for model in self._models.values():
            self._counts["forward_backward waiting for a step"] += model.accumulated
            for op, _ in model.waiting.values():
                self._counts[f"{op} waiting"] += 1

    def waiting(self) -> list[str]:
        """Return the names of the operations that wait, as `folded_waiting` returns those of the state."""
        return [f"{name}:{number}" for name, model in self._models.items() for number in model.waiting]


def folded_waiting(engine: EngineState) -> list[str]:
    queued = [(model.name, each) for model in engine.clients.open_models for each in model.operations.values()]
    return [f"{name}:{each.number}" for name, each in queued if each.waits and _is_training(each)]


def _is_training(operation: Queued | ev.OperationAccepted) -> bool:
    return operation.op in TRAINING_OPERATIONS and not operation.passive
