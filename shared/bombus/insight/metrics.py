"""The figures of a run by name: one number for each name and step. Every chart, table and tracker shows these. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import comb, isfinite, sqrt

from bombus.hive.rollouts import SILENT
from bombus.replay.diagnosis.statistics import Spread, mean
from bombus.replay.diagnosis.steps import EvaluatedEpisode, StepFigures

PASS_KS = (1, 2, 4, 8, 16)
# The trainer's metrics that have a name of their own here. The others are called `trainer/NAME`.
_FROM_TRAINER = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "entropy": "policy/entropy",
    "kl_reference": "policy/kl_reference",
    "kl_sampler": "policy/kl_sampler",
    "kl_sampler_abs": "policy/sampler_difference",
    "kl_sampler_abs_max": "policy/sampler_difference_max",
    "ratio": "policy/ratio",
    "ratio_max": "policy/ratio_max",
    "clip_fraction": "policy/clipped_share",
    "masked_share": "policy/masked_share",
    "importance_capped": "policy/capped_share",
    "staleness_mean": "age/mean",
    "staleness_max": "age/max",
    "tokens_trained": "tokens/trained",
}
_SECONDS = "seconds_"


def step_metrics(row: StepFigures) -> dict[str, float]:
    """Return the figures of a step, keyed by names such as `reward/mean`. A figure that is not known is left out.

    Rewards and lengths are means over the episodes of the batch; figures by data set are means over its groups. Times
    are in seconds, lengths in tokens, and ages in policy versions.
    """
    return _finite(dict(_of_batch(row)) | dict(_of_collection(row)) | dict(_of_trainer(row.trainer)))


def _finite(figures: dict[str, float]) -> dict[str, float]:
    """Leave out what is not finite: even the squares of finite rewards may be too large for a float."""
    return {name: value for name, value in figures.items() if isfinite(value)}


def _of_batch(row: StepFigures) -> Iterator[tuple[str, float]]:
    yield from _of_spread("reward", row.rewards)
    if row.rewards.count and row.highest >= row.lowest:
        yield "reward/min", row.lowest
        yield "reward/max", row.highest
    for name, spread in row.data_sets.items():
        if name:  # otherwise the mean reward says the same
            yield from _of_spread(f"data_set/{name}", spread)
    for name, spread in row.metrics.items():
        yield f"reported/{name}", spread.mean
    yield "groups/count", float(row.groups)
    if row.groups:
        yield "groups/without_signal", row.silent.count / row.groups
    if row.successes.count:
        yield "reward/success_rate", row.successes.mean
    if row.tokens.count:
        yield from _of_spread("length", row.tokens)
        yield "length/truncated_share", row.truncated / row.tokens.count
    if row.calls.count:
        yield "turns/mean", row.calls.mean


def _of_spread(name: str, spread: Spread) -> Iterator[tuple[str, float]]:
    if spread.count:
        yield f"{name}/mean", spread.mean
        yield f"{name}/std", sqrt(spread.variance)


def _of_collection(row: StepFigures) -> Iterator[tuple[str, float]]:
    yield "episodes/ended", float(row.ended)
    yield "episodes/failed_with_reward", float(row.failed)
    yield "episodes/dropped_stale", float(row.stale)
    yield "episodes/unusable", float(row.unusable)
    for kind, count in row.aborted.items():
        yield f"aborted/{kind or 'no reason given'}", float(count)
    for kind, count in row.used_up.items():
        yield f"used_up/{kind}", float(count)
    yield "time/collecting_s", row.collecting_s
    yield "time/training_s", row.training_s
    if row.median_s:
        yield "time/episode_median_s", row.median_s
        yield "time/episode_max_s", row.slowest_s
    if row.sampled_tokens and row.collecting_s:
        yield "tokens/sampled", float(row.sampled_tokens)
        yield "tokens/sampled_per_s", row.sampled_tokens / row.collecting_s
    yield "queue/open_episodes", float(row.open)


def _of_trainer(metrics: dict[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if name in ("reward_mean", "reward_std", "groups", SILENT):
            continue  # the batch has them
        if name.startswith(_SECONDS):
            yield f"time/{name.removeprefix(_SECONDS)}_s", value
        else:
            yield _FROM_TRAINER.get(name, f"trainer/{name}"), value


def evaluation_metrics(episodes: Iterable[EvaluatedEpisode]) -> dict[int, dict[str, float]]:
    """Return the figures of each evaluated policy version: rewards by data set, and pass@k if tasks report success."""
    versions = defaultdict[int, list[EvaluatedEpisode]](list)
    for each in episodes:
        versions[each.version].append(each)
    return {version: _finite(dict(_of_version(played))) for version, played in sorted(versions.items())}


def _of_version(played: Sequence[EvaluatedEpisode]) -> Iterator[tuple[str, float]]:
    rewards, data_sets, tasks = Spread(), defaultdict[str, Spread](Spread), defaultdict[str, list[bool]](list)
    for each in played:
        rewards.add(each.reward)
        data_sets[each.data_set].add(each.reward)
        if each.is_success is not None:
            tasks[each.task].append(each.is_success)
    for name, spread in data_sets.items():
        if name:  # may be `mean` too: what follows then replaces it
            yield f"held_out/{name}", spread.mean
    yield from _of_spread("held_out", rewards)
    yield "held_out/episodes", float(rewards.count)
    for k in PASS_KS:
        known = [pass_at(k, len(attempts), sum(attempts)) for attempts in tasks.values() if len(attempts) >= k]
        if known:
            yield f"held_out/pass@{k}", mean(known)


def pass_at(k: int, count: int, successes: int) -> float:
    """Return the unbiased estimate of the probability that one of `k` attempts succeeds, from `successes` of `count`.

    1 - C(n - c, k) / C(n, k), from Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - comb(count - successes, k) / comb(count, k)
