"""The plan of a curriculum: its tiers in order, the tasks of each, and the rules by which they are mastered."""

from collections.abc import Sequence

import msgspec

from bombus.sdk.types import Task

TASKS_MAX = 100_000
TIERS_MAX = 64
TASK_ID_CHARACTERS_MAX = 512  # the hive's limit


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ValueError(f"{name} is {value}: it must be from {low:g} to {high:g}")


class TierRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a tier is mastered: after at least `results_min` results of its tasks, with a success rate of at least
    `rate_min`."""

    results_min: int = 5
    rate_min: float = 0.6

    def __post_init__(self) -> None:
        _check_range("results_min", self.results_min, 1, 10_000)
        _check_range("rate_min", self.rate_min, 0.0, 1.0)


class MasteryRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules that all tiers share.

    A success rate is a weighted mean over the last `window` results: each result weighs `decay` times as much as the
    one after it.
    """

    window: int = 10
    decay: float = 0.85
    graduation_rate: float = 0.7
    graduation_results: int = 3
    fast_results: int = 3
    fast_rate: float = 0.9
    review_first: int = 3  # results until a task that has graduated is due again; doubled by each successful review
    review_longest: int = 48
    novelty: float = 100.0
    weakness: float = 50.0  # multiplied by (1 - success rate)
    review: float = 30.0
    recency: float = -20.0
    recent: int = 2  # a task counts as recent until all tasks together have this many more results

    def __post_init__(self) -> None:
        for name in ("window", "graduation_results", "fast_results", "review_first", "review_longest"):
            _check_range(name, getattr(self, name), 1, 10_000)
        for name in ("decay", "graduation_rate", "fast_rate"):
            _check_range(name, getattr(self, name), 0.0, 1.0)
        for name in ("novelty", "weakness", "review", "recency"):
            _check_range(name, getattr(self, name), -1e6, 1e6)
        _check_range("recent", self.recent, 0, 10_000)
        if self.decay == 0.0:
            raise ValueError("decay is 0, so only the newest result would count: it must be above 0")
        if self.review_longest < self.review_first:
            raise ValueError(f"review_longest is {self.review_longest}: it must be at least review_first")


class CurriculumTier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier: the ids of its tasks, and the rules by which it is mastered."""

    name: str
    tasks: tuple[str, ...]
    rules: TierRules = TierRules()


class CurriculumPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers in the order in which they are mastered. The last tier is never left."""

    tiers: tuple[CurriculumTier, ...]
    mastery: MasteryRules = MasteryRules()

    def __post_init__(self) -> None:
        _check_range("the number of tiers", len(self.tiers), 1, TIERS_MAX)
        _check_range("the number of tasks", sum(len(tier.tasks) for tier in self.tiers), 0, TASKS_MAX)
        names: set[str] = set()
        seen: set[str] = set()
        for tier in self.tiers:
            if not tier.name or tier.name in names:
                raise ValueError(f"the tier name {tier.name!r} is empty or not unique: each tier needs its own name")
            if not tier.tasks:
                raise ValueError(f"the tier {tier.name!r} has no tasks: leave it out, or give it some")
            names.add(tier.name)
            for task in tier.tasks:
                if not 1 <= len(task) <= TASK_ID_CHARACTERS_MAX:
                    raise ValueError(
                        f"a task of {tier.name!r} has an id of {len(task)} characters: 1 to 512 are allowed"
                    )
                if task in seen:
                    raise ValueError(f"the task {task!r} is in the curriculum twice: ids must differ")
                seen.add(task)


FIVE_TIERS = {
    "warmup": TierRules(results_min=5, rate_min=0.6),
    "beginner": TierRules(results_min=5, rate_min=0.6),
    "intermediate": TierRules(results_min=8, rate_min=0.65),
    "advanced": TierRules(results_min=10, rate_min=0.7),
    "expert": TierRules(results_min=10, rate_min=0.7),
}


def plan_of(
    tasks: Sequence[Task], tiers: dict[str, TierRules] | None = None, mastery: MasteryRules | None = None
) -> CurriculumPlan:
    """Return the plan for tasks whose `metadata` names their `tier`, which must be one of `tiers` (five tiers by
    default).

    Tiers without tasks are left out. Raises `ValueError` for a task whose tier is not one of `tiers`.
    """
    known = FIVE_TIERS if tiers is None else tiers
    by_tier: dict[str, list[str]] = {name: [] for name in known}
    for task in tasks:
        tier = task.metadata.get("tier")
        if tier not in by_tier:
            names = ", ".join(known)
            raise ValueError(f"the task {task.task_id!r} has metadata['tier'] {tier!r}: it must be one of {names}")
        by_tier[tier].append(task.task_id)
    return CurriculumPlan(
        tiers=tuple(
            CurriculumTier(name=name, tasks=tuple(ids), rules=known[name]) for name, ids in by_tier.items() if ids
        ),
        mastery=mastery or MasteryRules(),
    )
