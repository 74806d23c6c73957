"""What the tests measured of each harness, kept in `.harnesses/results/` for the page."""

import re

import msgspec

from tests.harnesses.arena import Played
from tests.harnesses.catalogue import Harness
from tests.harnesses.evidence import Rewrite
from tests.harnesses.install import FOLDER

RESULTS = FOLDER / "results"
OVERRIDDEN = "x-bombus-overridden"


class Result(msgspec.Struct, frozen=True):
    """An episode of a harness. `overridden` has what it asked for and did not get."""

    harness: str
    way: str
    finished: bool
    calls: int
    sequences: int
    rewrites: tuple[Rewrite, ...]
    overridden: tuple[str, ...]


def remember(harness: Harness, way: str, played: Played) -> None:
    """Write down what an episode was like."""
    said = ",".join(exchange.answer_headers.get(OVERRIDDEN, "") for exchange in played.exchanges)
    evidence = played.evidence
    found = Result(
        harness=harness.id,
        way=way,
        finished=played.is_finished,
        calls=evidence.calls,
        sequences=evidence.sequences,
        rewrites=evidence.rewrites,
        overridden=tuple(sorted(set(re.findall(r"[^,\s]+", said)))),
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", f"{harness.id} {way}")
    (RESULTS / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


def results() -> dict[tuple[str, str], Result]:
    """Return the results of the last runs, by harness and way."""
    found = [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(RESULTS.glob("*.json"))]
    return {(each.harness, each.way): each for each in found}
