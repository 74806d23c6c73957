"""Faults of the optimizer and the policy: whether the policy moves too much, too little, or away from the sampler."""

from functools import partial

from bombus.config.algorithms import Aggregation
from bombus.config.trainer import FULL_LR, LORA_LR
from bombus.replay.diagnosis.findings import WINDOW, FaultKind, RunFinding, Seen, reward_of, trainer_metric
from bombus.replay.diagnosis.statistics import CERTAIN, VISIBLE, change, mean, median, ratio, surprise
from bombus.replay.diagnosis.steps import StepFigures

LOST = 0.25  # fraction of the mean reward lost, along with turbulence: more than the ups and downs of a healthy run
TURBULENCE = 2.0  # growth of gradient, clipping or entropy that tells a high learning rate from harder tasks
GROSS = 4.0  # turbulence at which a merely visible fall of the reward suffices
SHAKEN = 1.6  # factor by which a falling entropy must outpace its trend to count as turbulence
LR_LOW = 20.0  # factor below the default learning rate; schedules may end at a tenth of it
CLIPPED = 2.5  # multiple of the gradient norm's bound; Adam ignores constant scaling, but clipping is not constant
LASTING = 8  # number of steps that must show a fault
MISMATCH = 0.01  # limit of kl_sampler if sampler and policy have the same version (docs/reward.md)
MISMATCH_STALE, MISMATCH_GROWN = 0.05, 3.0  # limits for samples older than the policy: absolute, relative to before
CONCENTRATED = 5.0  # multiple of the mismatch of all tokens: the ends of answers are few, so they vary more by chance
ALL = "the same tokens"
MISMATCHED = {
    "kl_sampler": (ALL, "look for quantized or low-precision inference, or a mixture of experts; set "
        "trainer.correction to icepop with tis_clip_low 0.5 and tis_clip 5"),
    "kl_sampler_first": ("the first tokens of answers", "compare the prompts that both see, token by token: look for "
        "a token that begins the text, a stale prefix cache, or a part that the inference server adds or cuts"),
    "kl_sampler_last": ("the last tokens of answers", "look for settings with which the inference server forbids "
        "or forces tokens that end an answer: min_tokens, ignore_eos, logit_bias, a grammar"),
}  # fmt: skip
DRIFTED = 0.2  # kl_sampler of old samples, in nats per token: with usual learning rates it is a tenth of this
CAPPED = 0.1  # fraction of the importance weights that reach their bound


def lr_too_high(seen: Seen) -> RunFinding | None:
    before, recent = seen.both(reward_of)
    if not seen.comparable or not before or not recent:
        return None
    then, now = mean(before), mean(recent)
    both = {name: seen.both(trainer_metric(name)) for name in ("grad_norm", "clip_fraction", "entropy")}
    rough = {name: ratio(*each) for name, each in both.items() if all(each) and change(*each) > CERTAIN}
    rough = {name: times for name, times in rough.items() if times >= TURBULENCE}
    if all(both["entropy"]) and surprise(*both["entropy"]) < -CERTAIN and ratio(*both["entropy"]) < 1 / SHAKEN:
        rough["entropy"] = ratio(*both["entropy"])
    certain = VISIBLE if max(rough.values(), default=0.0) >= GROSS else CERTAIN
    fell = then - now > LOST * abs(then) and change(before, recent) < -certain
    if not rough or (not fell and (len(rough) < 2 or seen.better)):
        return None
    name, times = max(rough.items(), key=lambda item: item[1])
    return seen.found(
        FaultKind.LR_TOO_HIGH,
        f"the mean reward went from {then:.3g} to {now:.3g}, and {name} to {min(times, 1e6):.3g} times its value",
        f"go back to an earlier checkpoint, and set trainer.lr to {seen.job.trainer.lr / 3:.2g}",
    )


def lr_too_low(seen: Seen) -> RunFinding | None:
    trainer = seen.job.trainer
    usual = LORA_LR if trainer.lora_rank else FULL_LR
    limit = trainer.lr / LR_LOW**2  # below which even a warm-up is too long
    if seen.recent[-1].step >= trainer.warmup_steps + LASTING:
        limit = max(usual / LR_LOW, limit)
    rates = seen.newest("lr", LASTING)
    if not rates or max(rates) > limit or seen.better:
        return None
    words, advice = f"{usual:.2g} is usual", f"set trainer.lr to {usual:.2g}"
    if rates[-1] < trainer.lr / 2:  # the job's own rate may be right: its schedule is not
        schedule = f"warmup_steps (now {trainer.warmup_steps}), lr_schedule, total_steps (now {trainer.total_steps})"
        words, advice = f"the job's is {trainer.lr:.2g}", f"look at trainer.{schedule} and min_lr_ratio"
    return seen.found(
        FaultKind.LR_TOO_LOW,
        f"the learning rate is {rates[-1]:.2g}, while {words}; the model is not improving",
        advice,
        lambda row: row.trainer["lr"] <= limit if "lr" in row.trainer else None,
    )


def _lost_update(row: StepFigures) -> bool:
    return row.trainer.get("updates_left_out", 0.0) > 0


def not_finite(seen: Seen) -> RunFinding | None:
    lost = [row.trainer["updates_left_out"] for row in seen.recent if _lost_update(row)]
    if len(lost) < 2:  # a single such update can be an artefact of low precision
        return None
    return seen.found(
        FaultKind.NOT_FINITE,
        f"{sum(lost):.0f} updates in {len(lost)} of {len(seen.recent)} steps had a loss or gradient that is not "
        "finite, and were left out",
        f"set trainer.lr to {seen.job.trainer.lr / 3:.2g}; if it persists, compute in float32 (model.dtype)",
        _lost_update,
    )


def gradient_clipped(seen: Seen) -> RunFinding | None:
    trainer, norms = seen.job.trainer, seen.newest("grad_norm", LASTING)
    limit = CLIPPED * trainer.grad_clip
    if trainer.loss_aggregation in (Aggregation.EPISODE_SUM, Aggregation.TOKEN_SUM) or not norms or min(norms) < limit:
        return None
    return seen.found(
        FaultKind.GRADIENT_CLIPPED,
        f"grad_norm was between {min(norms):.3g} and {max(norms):.3g} for {len(norms)} steps, and is clipped at "
        f"{trainer.grad_clip:.3g}",
        f"set trainer.grad_clip to {2 * median(norms):.2g}, or find out what makes gradients so large: very few "
        "trained tokens, or rewards on a large scale",
        lambda row: row.trainer["grad_norm"] >= limit if "grad_norm" in row.trainer else None,
    )


def sampler_mismatch(seen: Seen) -> RunFinding | None:
    """Find a mismatch in all tokens or, if that is small, in the first or the last tokens of answers."""
    every = median(seen.newest("kl_sampler", WINDOW))
    ages = seen.newest("staleness_mean", WINDOW)
    for name, (tokens, advice) in MISMATCHED.items():
        before, _ = seen.both(trainer_metric(name))
        recent = seen.newest(name, WINDOW)
        is_stale = max(ages, default=0.0) >= 0.05
        if is_stale and not seen.comparable:
            continue  # updates since the samples were drawn may be the reason
        limit = MISMATCH if not is_stale else max(MISMATCH_STALE, MISMATCH_GROWN * median(before))
        limit = limit if tokens == ALL else max(limit, CONCENTRATED * every)
        if recent and min(recent) >= limit:
            return seen.found(
                FaultKind.SAMPLER_MISMATCH,
                f"{name} is {median(recent):.2g}: sampler and trainer give {tokens} different probabilities",
                advice,
                partial(_reaches, name, limit),
            )
    return None


def _reaches(name: str, limit: float, row: StepFigures) -> bool:
    return row.trainer.get(name, 0.0) >= limit


def weights_drift(seen: Seen) -> RunFinding | None:
    """Find samples so old that the policy has left them: their importance weights reach the bound of the correction,
    or most weights are far below 1, which no bound shows."""
    ages = seen.newest("staleness_mean", WINDOW)
    for name, limit, words in (
        ("importance_capped", CAPPED, "the correction bounds {:.0%} of their weights"),
        ("kl_sampler", DRIFTED, "kl_sampler is {:.2g}: the policy has since become another"),
    ):
        values = seen.newest(name, WINDOW)
        if values and ages and min(ages) > 0.5 and min(values) > limit:
            return seen.found(
                FaultKind.STALE,
                f"tokens are {mean(ages):.1f} versions old on average, and {words.format(median(values))}",
                f"set collection.max_staleness to {max(1, seen.job.collection.max_staleness // 2)}, make the training "
                "steps faster, or lower trainer.lr or the number of updates of a step",
                partial(_reaches, name, limit),
            )
    return None


RULES = (lr_too_high, lr_too_low, not_finite, gradient_clipped, sampler_mismatch, weights_drift)
