"""`/metrics` of a trainer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from bombus.machine.metrics import Declared, Metric, MetricValue

SECONDS = "seconds_"  # prefix of a step's metrics
DECLARED: Declared = {
    "bombus_trainer_steps_total": Metric("Steps that this trainer has made.", ("engine",)),
    "bombus_trainer_step_in_flight": Metric("1 while a step is made.", ("engine",)),
    "bombus_trainer_phase_seconds_total": Metric("Where the time of these steps went.", ("engine", "phase")),
    "bombus_trainer_loss": Metric("The loss of the newest step, if it had one.", ("engine",)),
    "bombus_trainer_grad_norm": Metric("The gradient norm of the newest step, if it had one.", ("engine",)),
}


class TrainerMetrics:
    """What a trainer counts."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._in_flight = False
        self._steps = 0
        self._seconds: dict[str, float] = {}
        self._newest: Mapping[str, float] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Show that a step is in flight while the block runs."""
        self._in_flight = True
        try:
            yield
        finally:
            self._in_flight = False

    def made(self, metrics: Mapping[str, float]) -> None:
        """Count a step, given its metrics."""
        self._steps += 1
        self._newest = metrics
        for name, value in metrics.items():
            if name.startswith(SECONDS):
                phase = name.removeprefix(SECONDS)
                self._seconds[phase] = self._seconds.get(phase, 0.0) + value

    async def values(self) -> list[MetricValue]:
        found: list[MetricValue] = [
            ("bombus_trainer_steps_total", (self._engine,), self._steps),
            ("bombus_trainer_step_in_flight", (self._engine,), float(self._in_flight)),
        ]
        for phase, seconds in self._seconds.items():
            found.append(("bombus_trainer_phase_seconds_total", (self._engine, phase), seconds))
        for name in ("loss", "grad_norm"):
            if name in self._newest:
                found.append((f"bombus_trainer_{name}", (self._engine,), self._newest[name]))
        return found
