"""Rules about the optimizer and the policy: whether it moves too much, too little, or away from the sampler."""

from math import log

from bombus.hive.diagnosis.findings import FaultKind, RunFinding, Seen, percent, reward_of
from bombus.hive.diagnosis.run import StepFigures, totals
from bombus.hive.diagnosis.statistics import CERTAIN, change, mean, median, ratio, rises, share_at_least, surprise
from bombus.hive.events import DropReason

LOST = 0.25  # of the mean reward, with turbulence: more than the ups and downs of a healthy run
TURBULENCE = 2.0  # of gradient, clipping or KL, by which a high learning rate is told from harder tasks
SHAKEN = 1.6  # the same for an entropy that falls, faster than its trend
LR_LOW = 20.0  # times below the default: a factor of ten is within what schedules end at
CLIPPED = 2.5  # times the bound of the gradient's norm: Adam does not feel a constant factor, but this is none
CLIPPED_STEPS = 8
KL_FAR = 0.1  # per token: beyond it the reference is left behind; healthy runs stay below for hundreds of steps
KL_GROWS = 3.0
COLLAPSED = 0.35  # of the entropy of the steps before, without more reward: a healthy fall goes with a rise
RISEN = 1.5
MISMATCH = 0.01  # of kl_sampler, where sampler and policy have one version (docs/reward.md)
MISMATCH_STALE = 0.05  # where samples are older than the policy
STALE = 0.1  # of the episodes, or of the weights that reach their bound


def lr_too_high(seen: Seen) -> RunFinding | None:
    before, recent = seen.means(reward_of)
    if not seen.comparable or not before or not recent:
        return None
    then, now, moved = mean(before), mean(recent), change(before, recent)
    names = ("grad_norm", "clip_fraction", "entropy")
    both = {name: seen.metric(name) for name in names}
    rough = {name: ratio(*each) for name, each in both.items() if all(each) and change(*each) > CERTAIN}
    rough = {name: times for name, times in rough.items() if times >= TURBULENCE}
    if all(both["entropy"]) and surprise(*both["entropy"]) < -CERTAIN and ratio(*both["entropy"]) < 1 / SHAKEN:
        rough["entropy"] = ratio(*both["entropy"])
    fell = then - now > LOST * abs(then) and moved < -CERTAIN
    if not rough or (not fell and (len(rough) < 2 or rises(before, recent))):
        return None
    name, times = max(rough.items(), key=lambda item: item[1])
    return seen.found(
        FaultKind.LR_TOO_HIGH,
        f"the mean reward went from {then:.3g} to {now:.3g}, and {name} to {min(times, 1e6):.3g} times its value",
        f"go back to the checkpoint before, and set trainer.lr to {seen.settings.lr / 3:.2g}",
    )


def lr_too_low(seen: Seen) -> RunFinding | None:
    before, recent = seen.metric("lr")
    rates = [
        rate for row, rate in zip(seen.rows, before + recent, strict=False) if row.step > seen.settings.warmup_steps
    ]
    limit = max(seen.settings.usual_lr / LR_LOW, seen.settings.lr / LR_LOW**2)
    if len(rates) < CLIPPED_STEPS or max(rates[-CLIPPED_STEPS:]) > limit:
        return None
    if rises(*seen.means(reward_of)):
        return None
    return seen.found(
        FaultKind.LR_TOO_LOW,
        f"the learning rate is {rates[-1]:.2g}, the usual one {seen.settings.usual_lr:.2g}; the reward does not rise",
        f"set trainer.lr to {seen.settings.usual_lr:.2g}, or look at lr_schedule, total_steps and min_lr_ratio",
        lambda row: row.trainer.get("lr", 1.0) <= limit,
    )


def not_finite(seen: Seen) -> RunFinding | None:
    lost = [row for row in seen.recent if row.trainer.get("updates_left_out", 0.0) > 0]
    if len(lost) < 2:  # one such update can be an accident of low precision
        return None
    count = sum(row.trainer["updates_left_out"] for row in lost)
    return seen.found(
        FaultKind.NOT_FINITE,
        f"{count:.0f} updates in {len(lost)} of {len(seen.recent)} steps had a loss or gradient that is not finite, "
        "and were left out",
        f"set trainer.lr to {seen.settings.lr / 3:.2g}; if it stays, compute in float32 (model.dtype)",
        lambda row: row.trainer.get("updates_left_out", 0.0) > 0,
    )


def gradient_clipped(seen: Seen) -> RunFinding | None:
    norms = [norm for part in seen.metric("grad_norm") for norm in part][-CLIPPED_STEPS:]
    limit = CLIPPED * seen.settings.grad_clip
    if seen.settings.sums_gradients or len(norms) < CLIPPED_STEPS or min(norms) < limit:
        return None
    return seen.found(
        FaultKind.GRADIENT_CLIPPED,
        f"grad_norm was between {min(norms):.3g} and {max(norms):.3g} for {len(norms)} steps, and is clipped at "
        f"{seen.settings.grad_clip:.3g}",
        f"set trainer.grad_clip to {2 * median(norms):.2g}, or look for what makes gradients so large: very few "
        "trained tokens, or rewards on a large scale",
        lambda row: row.trainer.get("grad_norm", 0.0) >= limit,
    )


def kl_runaway(seen: Seen) -> RunFinding | None:
    before, recent = seen.metric("kl_reference")
    if not seen.comparable or not before or not recent or min(recent) < KL_FAR or recent[-1] < recent[0]:
        return None
    if ratio(before, recent) < KL_GROWS:
        return None
    coefficient = seen.settings.kl_coef
    return seen.found(
        FaultKind.KL_RUNAWAY,
        f"the KL to the reference is {recent[-1]:.2g} for each token, {median(before):.2g} before, and grows",
        f"set trainer.kl_coef to {coefficient * 5 if coefficient else 0.01:.2g}, or lower trainer.lr",
        lambda row: row.trainer.get("kl_reference", 0.0) >= KL_FAR,
    )


def entropy_collapse(seen: Seen) -> RunFinding | None:
    before, recent = seen.metric("entropy")
    if (
        not seen.comparable
        or not before
        or ratio(before, recent) > COLLAPSED
        or not all(x > 0 for x in before + recent)
    ):
        return None
    logs = [log(value) for value in before], [log(value) for value in recent]
    if surprise(*logs) > -CERTAIN or rises(*seen.means(reward_of)):
        return None
    limit = median(before) * (1 + COLLAPSED) / 2
    return seen.found(
        FaultKind.ENTROPY_COLLAPSE,
        f"the entropy fell from {median(before):.2g} to {median(recent):.2g}, and the reward did not rise with it",
        "set trainer.clip_high to 0.28, or trainer.entropy_coef to 0.001; keep the temperature at 1",
        lambda row: row.trainer.get("entropy", limit) < limit,
    )


def entropy_rises(seen: Seen) -> RunFinding | None:
    before, recent = seen.metric("entropy")
    if not seen.comparable or not before or ratio(before, recent) < RISEN or change(before, recent) < CERTAIN:
        return None
    if rises(*seen.means(reward_of)):
        return None
    limit = median(before) * (1 + RISEN) / 2
    return seen.found(
        FaultKind.ENTROPY_RISES,
        f"the entropy rose from {median(before):.2g} to {median(recent):.2g}, and the reward did not",
        f"set trainer.entropy_coef to {seen.settings.entropy_coef / 10:.2g}"
        if seen.settings.entropy_coef
        else f"set trainer.lr to {seen.settings.lr / 3:.2g}, and read an episode: the policy drifts towards noise",
        lambda row: row.trainer.get("entropy", limit) > limit,
    )


def sampler_mismatch(seen: Seen) -> RunFinding | None:
    before, recent = seen.metric("kl_sampler")
    ages = seen.metric("staleness_mean")[1]
    limit = MISMATCH if max(ages, default=0.0) < 0.05 else max(MISMATCH_STALE, KL_GROWS * median(before))
    if len(recent) < len(seen.recent) or len(recent) < 3 or min(recent) < limit:
        return None
    return seen.found(
        FaultKind.SAMPLER_MISMATCH,
        f"kl_sampler is {median(recent):.2g}: sampler and trainer give the same tokens different probabilities",
        "look for quantized or low-precision inference, or a mixture of experts; set trainer.correction to icepop with "
        "tis_clip_low 0.5 and tis_clip 5",
        lambda row: row.trainer.get("kl_sampler", 0.0) >= limit,
    )


def stale(seen: Seen) -> RunFinding | None:
    """Find samples that are too old: many are dropped, or their weights reach the bound of the correction."""
    dropped = totals(seen.recent, "dropped")[DropReason.STALE]
    ended = sum(row.ended for row in seen.recent)
    lost = dropped + sum(row.trainer.get("episodes_stale", 0.0) for row in seen.recent)
    capped, ages = seen.metric("importance_capped")[1], seen.metric("staleness_mean")[1]
    old = len(ages) == len(seen.recent) and min(ages) > 0.5 and len(capped) > 2 and min(capped) > STALE
    if share_at_least(lost, ended) < STALE and not old:
        return None
    figure = f"{percent(lost / max(1, ended))} of the episodes are dropped as too old"
    if old:
        figure = (
            f"tokens are {mean(ages):.1f} versions old on average, and the correction bounds {percent(median(capped))} "
            "of their weights"
        )
    return seen.found(
        FaultKind.STALE,
        figure,
        f"set collection.max_staleness to {max(1, seen.settings.max_staleness // 2)}, or give the trainer more speed",
        _is_stale,
    )


def _is_stale(row: StepFigures) -> bool:
    lost = row.dropped.get(DropReason.STALE, 0) + row.trainer.get("episodes_stale", 0.0)
    return lost > STALE * row.ended or row.trainer.get("importance_capped", 0.0) > STALE
