"""The metrics of a forward_backward. Clients combine those of several requests as their names say."""

from bombus.operations import Scores

# The reductions that both clients know, after the colon in a metric's name.
REDUCTIONS = ("mean", "sum", "min", "max", "slack", "unique")
_WEIGHTED = (":mean", ":slack")  # combined by clients with weights, the numbers of data


def metrics_of(scores: Scores) -> dict[str, float]:
    """Return the metrics, each named `name:reduction`: Tinker's client crashes on a name without exactly one colon.

    A metric without a reduction is a mean. `loss:sum` is always included, and so is `valid_tokens:sum`, the number of
    tokens that counted in it. Without data, means and slacks are left out: the clients divide by the number of data,
    and would crash.
    """
    named = {_named(name): value for name, value in scores.metrics.items()}
    if not scores.outputs:
        named = {name: value for name, value in named.items() if not name.endswith(_WEIGHTED)}
    return named | {"loss:sum": scores.loss, "valid_tokens:sum": float(scores.tokens)}


def _named(name: str) -> str:
    first, _, reduction = name.rpartition(":")
    if first and reduction in REDUCTIONS:
        return f"{first.replace(':', '_')}:{reduction}"
    return f"{name.replace(':', '_')}:mean"
