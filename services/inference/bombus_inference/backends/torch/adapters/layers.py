"""Linear layers that compute the rows of one pass with several adapters at the same time.

The adapters of a pass are concatenated: A along its rows, B along its columns. In each row of the pass, the low-rank
values of all adapters except the row's own are set to zero. So two matrix products serve all adapters, whatever their
ranks, and a row's result does not depend on which other adapters are present.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from bombus_inference.backends.torch.adapters.loaded import LoadedAdapter
from bombus_inference.backends.torch.adapters.own import replace_layer

SPARE_COLUMNS = 128  # kept for adapters not used in a pass, since any change copies all columns
NO_ADAPTER_ROW, UNUSED_COLUMN = -1, -2


class PassRows:
    """The rows of a pass, as masks of the columns that do not belong to each row's own adapter. The masks are None if
    no row has an adapter."""

    def __init__(self) -> None:
        self.whole_TR: Tensor | None = None  # for all rows of the pass
        self.others_TR: Tensor | None = None  # for the rows being computed now


class SideBySide(nn.Linear):
    """A linear layer y = W x + B A x, where each row has its own adapter or none.

    In half precision it computes y = [W, B] [x, A x], for the reason given in `AdaptedLinear`. It shares its parameters
    with the layer that it replaces, and that layer still computes passes without adapters.
    """

    def __init__(self, own: nn.Linear, rows: PassRows) -> None:
        super().__init__(own.in_features, own.out_features, bias=False, device="meta")
        self.weight, self.bias = own.weight, own.bias
        self.own = (own,)  # in a tuple, so that torch does not register it as a submodule
        self._rows = rows
        self._low_a: Tensor | None = None  # [R, in]
        self._low_b: Tensor | None = None  # [out, R] in float32
        self._whole: Tensor | None = None  # [out, in + R] in half precision

    def set_columns(self, low_a: Tensor | None, low_b: Tensor | None) -> None:
        """Set A [R, in] and B [out, R] for all adapters, with the scales included in B. Both are None for no
        adapters."""
        self._low_a, self._low_b, self._whole = low_a, None, None
        if low_b is None:
            return
        if self.weight.dtype == torch.float32:
            self._low_b = low_b
        else:
            self._whole = torch.cat((self.weight.data, low_b), dim=1)
            self.weight.data = self._whole[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        others_TR = self._rows.others_TR
        if others_TR is None:
            return self.own[0](x)  # type: ignore[no-any-return]
        if self._low_a is None:
            return linear(x, self.weight, self.bias)
        low = linear(x, self._low_a).masked_fill_(others_TR, 0.0)
        if self._whole is not None:
            return linear(torch.cat((x, low), dim=-1), self._whole, self.bias)
        assert self._low_b is not None
        out = linear(x, self.weight, self.bias)
        flat = out.view(-1, self.out_features)
        flat.addmm_(low.view(-1, low.shape[-1]), self._low_b.T)
        return out


class AdapterColumns:
    """The columns of a pass's adapters, in every layer of a model that is changed by any of the adapters."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers: dict[str, SideBySide] = {}
        self._placed: dict[str, LoadedAdapter] = {}  # least recently used first
        self._numbers: dict[str, int] = {}
        self._owners_R = torch.empty(0, dtype=torch.long)
        self._rows = PassRows()

    @property
    def columns(self) -> int:
        """The number of adapter columns that each layer computes for every row of a pass."""
        return len(self._owners_R)

    def place(self, wanted: Mapping[str, LoadedAdapter]) -> None:
        """Ensure that these adapters have columns. Columns of other adapters are kept only if there are few of them."""
        needed = sum(adapter.rank for adapter in wanted.values())
        missing = any(address not in self._placed for address in wanted)
        for address in wanted:
            if address in self._placed:
                self._placed[address] = self._placed.pop(address)
        if not missing and self.columns <= 2 * (needed + SPARE_COLUMNS):
            return
        chosen = dict(wanted)
        spare = SPARE_COLUMNS
        for address in reversed(self._placed):
            adapter = self._placed[address]
            if address not in chosen and adapter.rank <= spare:
                chosen[address] = adapter
                spare -= adapter.rank
        self._placed = dict(reversed(chosen.items()))
        self._build()

    def forget(self, address: str) -> None:
        """Drop an adapter that is no longer loaded. Its columns stay until the columns are next rebuilt, or until no
        adapter is left."""
        if self._placed.pop(address, None) is None:
            return
        if self._placed:
            self._owners_R.masked_fill_(self._owners_R == self._numbers.pop(address), UNUSED_COLUMN)
        else:
            self.detach()

    def use_rows(self, addresses: Sequence[str], tokens: Sequence[int]) -> None:
        """Set the adapters for the next pass: `addresses[i]`, or no adapter if it is "", applies to the next
        `tokens[i]` rows."""
        if not any(addresses):
            self._rows.whole_TR = self._rows.others_TR = None
            return
        device = self._owners_R.device
        numbers = torch.tensor(
            [self._numbers[address] if address else NO_ADAPTER_ROW for address in addresses], device=device
        )
        rows_T = numbers.repeat_interleave(torch.tensor(tokens, device=device), output_size=sum(tokens))
        self._rows.whole_TR = self._rows.others_TR = rows_T[:, None] != self._owners_R[None]

    def keep_rows(self, index: Tensor | slice) -> None:
        """Compute only these rows of the pass from now on, as the output layer does."""
        if self._rows.whole_TR is not None:
            self._rows.others_TR = self._rows.whole_TR[index]

    @torch.no_grad()
    def detach(self) -> None:
        """Restore the model's original layers. The next `place` rebuilds everything."""
        for name, layer in self._layers.items():
            layer.weight.data = layer.weight.data.contiguous()
            replace_layer(self._model, name, layer.own[0])
        self._layers.clear()
        self._placed.clear()
        self._numbers.clear()
        self._owners_R = self._owners_R[:0]

    @torch.no_grad()
    def _build(self) -> None:
        self._numbers = {address: number for number, address in enumerate(self._placed)}
        device = next(self._model.parameters()).device
        self._owners_R = torch.tensor(
            [self._numbers[address] for address, adapter in self._placed.items() for _ in range(adapter.rank)],
            device=device,
        )
        names = dict.fromkeys(name for adapter in self._placed.values() for name in adapter.layers)
        for name in self._layers.keys() - names.keys():
            self._layers[name].set_columns(None, None)
        for name in names:
            layer = self._layers.get(name) or self._wrapped(name)
            weight = layer.weight
            low_a = weight.new_zeros(self.columns, layer.in_features)
            low_b = weight.new_zeros(layer.out_features, self.columns)
            start = 0
            for adapter in self._placed.values():
                low_rank = adapter.layers.get(name)
                if low_rank is not None:
                    end = start + len(low_rank.low_a)
                    low_a[start:end] = low_rank.low_a
                    low_b[:, start:end] = low_rank.low_b
                start += adapter.rank
            layer.set_columns(low_a, low_b)

    def _wrapped(self, name: str) -> SideBySide:
        own = self._model.get_submodule(name)
        assert isinstance(own, nn.Linear)
        layer = self._layers[name] = SideBySide(own, self._rows)
        replace_layer(self._model, name, layer)
        return layer
