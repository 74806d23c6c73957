"""`/metrics` of a trainer."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from bombus.machine.metrics import exposition

SECONDS = "seconds_"  # prefix of a step's metrics


class TrainerMetrics:
    """What a trainer counts. `in_flight` is 1 while a step is made."""

    def __init__(self, engine: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._engine = engine
        self._steps = Counter(
            "bombus_trainer_steps_total", "Steps that this trainer has made.", ["engine"], registry=registry
        ).labels(engine)
        self.in_flight = Gauge(
            "bombus_trainer_step_in_flight", "1 while a step is made.", ["engine"], registry=registry
        ).labels(engine)
        text = "Where the time of these steps went."
        self._seconds = Counter("bombus_trainer_phase_seconds_total", text, ["engine", "phase"], registry=registry)
        text = "of the newest step, if it had one."
        self._newest = {
            "loss": Gauge("bombus_trainer_loss", f"The loss {text}", ["engine"], registry=registry),
            "grad_norm": Gauge("bombus_trainer_grad_norm", f"The gradient norm {text}", ["engine"], registry=registry),
        }

    def made(self, metrics: Mapping[str, float]) -> None:
        """Count a step, given its metrics."""
        self._steps.inc()
        for name, value in metrics.items():
            if name.startswith(SECONDS):
                self._seconds.labels(self._engine, name.removeprefix(SECONDS)).inc(max(0.0, value))
        for name, gauge in self._newest.items():
            gauge.clear()
            if name in metrics:
                gauge.labels(self._engine).set(metrics[name])

    async def exposed(self) -> bytes:
        return exposition((), self.registry)
