"""Keep a demo's settings and progress in its folder, so that an interrupted demo can resume."""

from pathlib import Path

import msgspec

from bombus.demo.training import Curve, Measured, Stepped, Watcher
from bombus.errors import Code, Refused
from bombus.private import private_folder, write_private

DEMO, CURVE = "demo.json", "curve.json"


class DemoOf(msgspec.Struct, frozen=True):
    """What a demo trains: a model, and the seed for everything random. `id` distinguishes demos in the same hive."""

    model: str
    seed: int
    id: str = ""  # empty in the folders of older versions, whose demos share one experiment

    def __str__(self) -> str:
        return f"of the model {self.model} with seed {self.seed}"

    def experiment(self, game: str) -> str:
        """Return the name of a game's experiment. A run is continued only within the same experiment."""
        return f"demo-{self.id}-{game}" if self.id else "demo"


def open_folder(out: Path, wanted: DemoOf) -> DemoOf | None:
    """Create the folder for a demo and return None, or return the earlier demo in the folder, which must be resumed.

    Raises `Refused` if the demo in the folder has another model or seed, or if the folder has files but no demo.
    """
    try:
        found = msgspec.json.decode((out / DEMO).read_bytes(), type=DemoOf)
    except FileNotFoundError:
        _begin(out, wanted)
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Refused(Code.BAD_CONFIG, f"{out / DEMO} cannot be read: {error}. Name another --out.") from error
    if (found.model, found.seed) != (wanted.model, wanted.seed):
        raise Refused(
            Code.BAD_CONFIG,
            f"{out} has a demo {found}, but this one is {wanted}: name another --out, or pass that model and seed",
        )
    return found


def _begin(out: Path, wanted: DemoOf) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(Code.BAD_CONFIG, f"{out} has something other than a demo in it: name another --out, or remove it")
    private_folder(out)
    _write(out / DEMO, wanted)


def load_curve(folder: Path) -> Curve | None:
    """Return the curve of an earlier demo, or None if there is none. Raises `Refused` if it cannot be read."""
    try:
        return msgspec.json.decode((folder / CURVE).read_bytes(), type=Curve)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Refused(Code.BAD_CONFIG, f"{folder / CURVE} cannot be read: {error}") from error


class Keeper(Watcher):
    """Writes the curve to the folder after each step and measurement, and passes both on to a display."""

    def __init__(self, folder: Path, curve: Curve, shown: Watcher) -> None:
        self._file = folder / CURVE
        self._curve = curve
        self._shown = shown

    def measuring(self, done: int, total: int) -> None:
        self._shown.measuring(done, total)

    def measured(self, point: Measured) -> None:
        _write(self._file, self._curve)
        self._shown.measured(point)

    def stepped(self, step: Stepped) -> None:
        _write(self._file, self._curve)
        self._shown.stepped(step)


def _write(file: Path, value: DemoOf | Curve) -> None:
    write_private(file, msgspec.json.encode(value).decode())
