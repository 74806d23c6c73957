"""Which blocks of the KV cache are free, held or remembered: pure accounting, no tensors.

A full block is remembered under (its parent's name, its tokens), so what is remembered is a tree of prefixes and a
look-up is exact. Its root changes with every weight swap, so no key or value of older weights is ever found again.
"""

from collections import OrderedDict

from bombus.errors import EngineFault

NO_NAME = -1

Key = tuple[int, tuple[int, ...]]


class Blocks:
    """A block is free (worth nothing), held by one or more sequences, or idle (remembered, and held by none)."""

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self.root = 0
        self._next_name = 1
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._names = [NO_NAME] * count
        self._keys: list[Key | None] = [None] * count
        self._remembered: dict[Key, int] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.count - self.available

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self) -> int:
        """A block that the caller holds alone; an idle one is forgotten for it. Raises `EngineFault` without any."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise EngineFault("every block of the KV cache is held")
        self._holders[block] = 1
        return block

    def find(self, parent: int, tokens: tuple[int, ...]) -> int | None:
        """The block that holds `tokens` after `parent`, with the caller as one more holder."""
        block = self._remembered.get((parent, tokens))
        if block is None:
            return None
        if self._holders[block] == 0:
            del self._idle[block]
        self._holders[block] += 1
        return block

    def name_of(self, block: int) -> int:
        return self._names[block]

    def remember(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Let later prefixes find this full block. Returns the name under which its children are to be remembered."""
        key = (parent, tokens)
        known = self._remembered.get(key)
        if known is not None:  # computed twice at the same time: the first one serves, this one is freed in the end
            return self._names[known]
        name = self._next_name
        self._next_name += 1
        self._remembered[key] = block
        self._keys[block] = key
        self._names[block] = name
        return name

    def release(self, blocks: list[int]) -> None:
        """Give back a sequence's blocks, in its order. The last ones are evicted first: a prefix without its beginning
        is of no use."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def forget_all(self) -> None:
        """Nothing computed until now is found any more; what is held stays with its holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._remembered.clear()
        self._keys = [None] * self.count
        self._names = [NO_NAME] * self.count
        self.root = self._next_name
        self._next_name += 1

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._remembered[key]
        self._keys[block] = None
        self._names[block] = NO_NAME
