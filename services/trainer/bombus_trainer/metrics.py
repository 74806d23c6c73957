"""`/metrics` of a trainer."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import Metric

from bombus.machine.metrics import exposition, family

SECONDS = "seconds_"  # prefix of a step's metrics


class TrainerMetrics:
    """What a trainer counts."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._in_flight = False
        self._steps = 0
        self._seconds = defaultdict[str, float](float)
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
                self._seconds[name.removeprefix(SECONDS)] += value

    async def exposed(self) -> bytes:
        return exposition(self.families())

    def families(self) -> Iterator[Metric]:
        engine, its = self._engine, ("engine",)
        name, text = "bombus_trainer_steps_total", "Steps that this trainer has made."
        yield family(name, text, its, [((engine,), self._steps)])
        name, text = "bombus_trainer_step_in_flight", "1 while a step is made."
        yield family(name, text, its, [((engine,), self._in_flight)])
        name, text = "bombus_trainer_phase_seconds_total", "Where the time of these steps went."
        yield family(name, text, ("engine", "phase"), [((engine, phase), s) for phase, s in self._seconds.items()])
        for name, text in (("loss", "The loss"), ("grad_norm", "The gradient norm")):
            text += " of the newest step, if it had one."
            newest = [((engine,), self._newest[name])] if name in self._newest else []
            yield family(f"bombus_trainer_{name}", text, its, newest)
