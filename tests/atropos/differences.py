"""What we do otherwise than Atropos's server on purpose, as data.

A difference covers the answers of some routes once its condition has come up in a sequence of requests.
"""

from dataclasses import dataclass
from enum import StrEnum


class Why(StrEnum):
    FORMED_AHEAD = "formed_ahead"
    FAIR = "fair"
    EXACT = "exact"
    OLDEST = "oldest"
    MINIMUM = "minimum"
    ANONYMOUS = "anonymous"
    COMBINED = "combined"
    COMBINED_OLDEST = "combined_oldest"
    LARGER = "larger"
    LEFT = "left"
    NO_WEIGHT = "no_weight"


@dataclass(frozen=True)
class Difference:
    """Something that ours does otherwise. `covers` are the routes whose answers it explains."""

    theirs: str
    ours: str
    covers: frozenset[str]


BATCH, STATUS, STANDING, PUSH = "/batch", "/status", "/status-env", "/scored_data"


def _covers(*routes: str) -> frozenset[str]:
    return frozenset(routes)


DIFFERENCES: dict[Why, Difference] = {
    Why.FORMED_AHEAD: Difference(
        "forms all batches at the first GET /batch, counts their steps then, and serves the last one first",
        "forms one batch for each GET /batch, and counts its step then",
        _covers(BATCH, STATUS, STANDING),
    ),
    Why.FAIR: Difference(
        "takes groups in the order of the queue, whatever the weights of their environments are",
        "takes the oldest group, and then from each environment in turn, by weight",
        _covers(BATCH),
    ),
    Why.EXACT: Difference(
        "packs groups of equal sizes up to the largest group: other sizes block or wait, although a selection fits",
        "finds a selection of exactly a batch whenever there is one",
        _covers(BATCH),
    ),
    Why.OLDEST: Difference(
        "takes packs in the order in which they became complete, so a group can wait for others of its size",
        "takes the oldest group that fits, which can leave sizes that wait for others",
        _covers(BATCH),
    ),
    Why.MINIMUM: Difference(
        "forms a batch as soon as each environment with a minimum has one pack, even if that is less than the minimum, "
        "and none where it has no pack",
        "forms none while one has less than its minimum, and meets all minimums that the sizes of groups allow",
        _covers(BATCH),
    ),
    Why.ANONYMOUS: Difference(
        "never uses data without an environment where any environment has asked for a minimum",
        "uses it for the rest",
        _covers(BATCH),
    ),
    Why.COMBINED: Difference(
        "queues groups that were combined one by one, where they are packed by their own sizes, and may never be",
        "keeps them together: they count as one group of the environment's size",
        _covers(BATCH, STANDING),
    ),
    Why.COMBINED_OLDEST: Difference(
        "combines the newest held groups where the oldest ones do not add up in order",
        "combines the oldest group that is in any combination",
        _covers(BATCH, STANDING, PUSH, STATUS),
    ),
    Why.LARGER: Difference(
        "holds a group that is larger than its environment's group_size for ever, and any that wait for a size that is "
        "larger than a batch",
        "queues it at once",
        _covers(BATCH, STANDING, PUSH, STATUS),
    ),
    Why.LEFT: Difference(
        "holds groups of an environment that has left for ever",
        "queues what is held when its environment leaves",
        _covers(BATCH, STANDING, STATUS),
    ),
    Why.NO_WEIGHT: Difference(
        "fails with status 500 where the weights of all connected environments are 0",
        "answers the least weight",
        _covers(STANDING),
    ),
}
