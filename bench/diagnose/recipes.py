"""Healthy runs: what each recipe's steps look like, with the noise that such runs have.

`needle` follows the recorded log of `make demo`: its figures, and how these vary from step to step. The others are
drawn from what is usual for such jobs. Real runs of `make demo-tiny` are in `real.py`.
"""

from dataclasses import dataclass, field
from math import exp, log
from random import Random

from bombus.hive.events import Method


@dataclass
class StepPlan:
    """What a step is drawn from. Shares and probabilities are between 0 and 1; a fault changes some of these fields."""

    skill: float = 0.0  # log odds of success on a task of middling difficulty
    pace: float = 1.0  # how much is learnt from this step, relative to the healthy run
    scale: float = 1.0  # of rewards
    outliers: float = 0.0  # share of rewards that are 50 times as large
    inverted: bool = False
    flipped: float = 0.0  # share of the rewards that are inverted
    forced: float | None = None  # this reward for ...
    forced_share: float = 0.0  # ... this share of the groups
    alone: float = 0.0  # share of the groups with one episode
    tokens: float = 100.0
    length_pays: float = 0.0  # log odds of success for each doubling of an answer
    failures: float = 0.0  # share of the episodes that fail and are ended with a reward of 0
    aborted: dict[str, float] = field(default_factory=dict)  # by reason, relative to the batch
    dropped_stale: float = 0.0
    clients: dict[str, float] = field(default_factory=dict)
    broken: dict[str, float] = field(default_factory=dict)  # by client: the share of its episodes with reward 0
    data_sets: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)  # besides that for success: probabilities of full marks
    tasks: int = 0  # so many tasks come again and again; 0: all that the recipe has
    tool_failures: float = 0.0
    truncated: float = 0.0
    evaluation: float = 0.0  # skill in evaluation, less that in training
    evaluated_known: float = 0.0
    collecting_s: float = 20.0
    training_s: float = 15.0
    slowest: float = 1.0  # times the natural slowest episode
    metrics: dict[str, float] = field(default_factory=dict)
    duplicates: float = 0.0  # share of the answers that are copies within their group
    constant: float = 0.0  # share of the answers that are one constant
    same_prompt: float = 0.0  # share of the tasks that have one prompt
    leaked: float = 0.0  # share of the successful answers that were copied from the prompt
    phrase: float = 0.0  # share of the successful answers with a certain phrase


@dataclass(frozen=True)
class Recipe:
    """A kind of job, and how its figures go from the first step to the last."""

    name: str
    groups: int
    repeat: int
    steps: int
    trainer: dict[str, object]
    collection: dict[str, object] = field(default_factory=dict)
    rewards: str = "binary"  # binary, partial, score (unbounded), or parts (weighted)
    skill: tuple[float, float] = (-1.5, 1.0)
    difficulty: float = 1.5  # deviation of tasks, in log odds
    tokens: tuple[float, float] = (900.0, 1200.0)
    tokens_noise: float = 0.4  # of episodes, in logs
    length_pays: float = 0.0
    entropy: tuple[float, float] = (0.5, 0.3)
    entropy_noise: float = 0.05
    grad_norm: tuple[float, float] = (0.3, 0.4)
    grad_noise: float = 0.25
    clip_fraction: float = 0.002
    kl_sampler: float = 8e-4
    kl_reference: float = 0.0  # after 60 steps
    staleness: float = 0.0
    cut: float = 0.0
    clients: tuple[float, ...] = (1.0,)
    data_sets: tuple[float, ...] = (1.0,)
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    tools: float = 0.0  # calls of an episode
    aborted: float = 0.0
    tasks: int = 0  # how many there are; 0: each is new
    evaluation: tuple[int, int] = (0, 0)  # every so many steps, so many episodes
    seconds: tuple[float, float] = (20.0, 15.0)  # to collect and to train a batch
    seconds_noise: float = 0.15
    plateau: int = 0  # steps at the end, in which nothing is left to learn
    alike: bool = False  # whether all right answers to a task are equal

    def plan(self, progress: float, chance: Random) -> StepPlan:
        """Return a healthy step after a part of what there is to learn, from 0 to 1."""

        def level(ends: tuple[float, float]) -> float:
            return ends[0] + (ends[1] - ends[0]) * progress

        def noisy(value: float, deviation: float) -> float:
            return value * exp(chance.gauss(0.0, deviation))

        first, last = self.entropy
        cut = noisy(self.cut, 0.3) if self.cut else 0.0
        metrics = {
            "entropy": noisy(first * exp(log(last / first) * min(1.0, 1.4 * progress)), self.entropy_noise),
            "grad_norm": noisy(level(self.grad_norm), self.grad_noise),
            "clip_fraction": noisy(self.clip_fraction, 0.5),
            "kl_sampler": noisy(self.kl_sampler, 0.2),
            "kl_sampler_abs": noisy(
                0.5 * self.kl_sampler**0.5, 0.1
            ),  # k3 is half of the square, mostly of a few tokens
            "kl_sampler_first": noisy(self.kl_sampler, 0.7),
            "kl_sampler_last": noisy(self.kl_sampler, 0.7),
            "importance_capped": noisy(0.01, 0.3) if self.staleness else 0.0,
            "staleness_mean": max(0.0, chance.gauss(self.staleness, 0.1)) if self.staleness else 0.0,
            "loss": chance.gauss(0.0, 0.03),
            "updates_left_out": 0.0,
            "cut_share": cut,
        }
        if self.kl_reference:
            metrics["kl_reference"] = noisy(self.kl_reference * (0.02 + progress), 0.1)
        return StepPlan(
            skill=level(self.skill) + chance.gauss(0.0, 0.1),
            tokens=noisy(level(self.tokens), 0.04),
            length_pays=self.length_pays,
            aborted={"infra": self.aborted} if self.aborted else {},
            clients={f"client-{number}": weight for number, weight in enumerate(self.clients)},
            data_sets={f"set-{number}" if number else "": weight for number, weight in enumerate(self.data_sets)},
            parts={name: level(ends) for name, ends in self.parts.items()},
            tool_failures=0.08 if self.tools else 0.0,
            truncated=0.05 if self.tools else 0.0,
            collecting_s=noisy(self.seconds[0], self.seconds_noise),
            training_s=noisy(self.seconds[1], self.seconds_noise),
            metrics=metrics,
        )


LORA: dict[str, object] = {"lora_rank": 16}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "needle", 8, 8, 45, {**LORA, "lr": 3e-4}, rewards="partial", skill=(-4.0, 1.6), tokens=(7.8, 3.6),
            entropy=(3.8, 0.3), entropy_noise=0.35, grad_norm=(0.6, 1.9), grad_noise=0.45, clip_fraction=0.0,
            kl_sampler=1e-9, evaluation=(5, 128), seconds=(4.5, 3.0), seconds_noise=0.35, difficulty=2.5,
        ),
        Recipe(
            "spelling", 16, 8, 75, {**LORA, "lr": 1e-4}, rewards="partial", skill=(-4.0, 4.0), tokens=(14.0, 12.0),
            tokens_noise=0.15, entropy=(3.5, 0.15), grad_norm=(0.6, 0.3), kl_sampler=1e-6, tasks=40, seconds=(4.0, 3.0),
            difficulty=0.7, plateau=25, alike=True,
        ),
        Recipe(
            "sums", 16, 8, 75, {"lr": 2e-6}, skill=(-2.0, 5.0), tokens=(500.0, 380.0), entropy=(0.6, 0.1),
            grad_norm=(0.4, 0.2), difficulty=1.0, tasks=5000, evaluation=(5, 200), seconds=(60.0, 40.0), plateau=25,
        ),
        Recipe(
            "math", 16, 8, 60, {"lr": 1e-6}, tokens=(900.0, 1300.0), length_pays=-0.2, cut=0.04, tasks=2000,
            evaluation=(5, 200), seconds=(180.0, 120.0),
        ),
        Recipe(
            "agent", 12, 8, 50, {"lr": 2e-6}, {"max_staleness": 2}, rewards="partial", skill=(-2.0, 0.5),
            tokens=(2500.0, 2200.0), tokens_noise=0.6, staleness=1.0, kl_sampler=6e-3, clients=(1.0, 1.0, 1.0),
            tools=6.0, aborted=0.03, cut=0.02, seconds=(300.0, 200.0), seconds_noise=0.3,
        ),
        Recipe(
            "code", 12, 8, 50, {**LORA, "lr": 2e-5}, rewards="parts", skill=(-1.8, 0.3), tokens=(600.0, 700.0),
            parts={"reward/format": (0.55, 0.9)}, clients=(2.0, 1.0), aborted=0.02, evaluation=(5, 100),
            entropy=(0.7, 0.4), seconds=(90.0, 40.0), tasks=500,
        ),
        Recipe(
            "game", 96, 1, 50, {"lr": 1e-6, "adv_estimator": "reinforce_plus_plus"}, rewards="score", skill=(-1.0, 2.0),
            tokens=(300.0, 330.0), clients=(1.0, 1.0, 1.0, 1.0), entropy=(1.2, 0.8), seconds=(60.0, 30.0), tasks=60,
        ),
        Recipe(
            "dapo", 16, 8, 60, {"lr": 1e-6, "clip_high": 0.28}, {"method": Method.ENOUGH_NON_DUMMY_TASKS},
            tokens=(1500.0, 2600.0), cut=0.08, entropy=(0.6, 0.55), skill=(-1.2, 0.6), clip_fraction=0.01, tasks=3000,
            seconds=(400.0, 150.0), kl_sampler=2e-3,
        ),
        Recipe(
            "judged", 12, 8, 50, {"lr": 1e-6, "kl_coef": 0.01}, rewards="parts", skill=(-0.8, 0.8),
            tokens=(250.0, 300.0), parts={"reward/form": (0.75, 0.92)}, data_sets=(3.0, 2.0), kl_reference=0.04,
            evaluation=(5, 150), entropy=(0.9, 0.7), seconds=(40.0, 30.0), tasks=1000,
        ),
    )
}  # fmt: skip
