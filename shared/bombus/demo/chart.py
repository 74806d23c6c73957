"""The reward curve as a picture."""

from pathlib import Path

from bombus.demo.training import Curve


def draw(curve: Curve, path: Path, title: str, constant: float) -> None:
    """Draw the batch and held-out rewards over seconds of training, with the best constant reply for comparison."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    seconds = [step.training_s for step in curve.steps]
    axes.plot(seconds, [step.reward for step in curve.steps], color="#9ecae1", linewidth=1, label="training batches")
    measured = [point.training_s for point in curve.measured]
    if measured:
        rewards = [point.reward for point in curve.measured]
        axes.plot(measured, rewards, "o-", color="#08519c", label="held-out reward")
        axes.plot(
            measured, [point.exact for point in curve.measured], "s--", color="#e6550d", label="held-out, exactly right"
        )
        axes.axhline(rewards[0], color="#969696", linestyle=":", label="base model")
    axes.axhline(constant, color="#31a354", linestyle=":", label="best constant reply")
    axes.set(xlabel="seconds of training", ylabel="reward", ylim=(0, 1.02), title=title)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
