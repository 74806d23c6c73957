"""An adapter in memory that is served beside the engine's own policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bombus_inference.backends.torch.adapters.own import LowRank


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter: its layers by name, and the scales that were multiplied into them. `rank` is the highest rank of any
    layer.

    `uses` is the number of open requests that use the adapter.
    """

    layers: Mapping[str, LowRank]
    scales: Mapping[str, float]
    rank: int = field(init=False)
    bytes: int = field(init=False)
    uses: int = 0

    def __post_init__(self) -> None:
        self.rank = max(len(low_rank.low_a) for low_rank in self.layers.values())
        self.bytes = sum(side.nbytes for low_rank in self.layers.values() for side in (low_rank.low_a, low_rank.low_b))
