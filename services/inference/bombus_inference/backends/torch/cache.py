"""Keeps track of which blocks of the KV cache are free, held or remembered. Pure accounting, no tensors.

A full block is remembered by its parent's name and its tokens, so the remembered blocks form a tree of prefixes and
look-ups are exact. Each adapter has its own root, and all roots change whenever weights are swapped, so a look-up never
returns keys or values computed with another adapter or older weights.
"""

from collections import OrderedDict

from bombus.errors import EngineFault

NO_NAME = -1

Key = tuple[int, tuple[int, ...]]


class Blocks:
    """The blocks of a KV cache. Each is free (its contents are not needed), held by one or more sequences, or idle
    (remembered but not held)."""

    def __init__(self, count: int, block_tokens: int) -> None:
        self.count = count
        self.block_tokens = block_tokens
        self._roots: dict[str, int] = {}
        self._next_name = 0
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
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

    def root(self, adapter: str = "") -> int:
        """Return the name of an adapter's empty prefix, where "" means the engine's own policy."""
        name = self._roots.get(adapter)
        if name is None:
            name = self._roots[adapter] = self._next_name
            self._next_name += 1
        return name

    def forget_root(self, adapter: str) -> None:
        """Ensure that blocks computed with this adapter are never found again."""
        self._roots.pop(adapter, None)

    def take(self) -> int:
        """Return a block that only the caller holds, forgetting an idle block if none is free.

        Raises `EngineFault` if every block is held.
        """
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise EngineFault("every block of the KV cache is in use")
        self._holders[block] = 1
        return block

    @property
    def remembered(self) -> int:
        """How many blocks later prefixes can find."""
        return len(self._remembered)

    def find(self, parent: int, tokens: tuple[int, ...]) -> int | None:
        """Return the block that contains `tokens` and follows `parent`, and add the caller to its holders."""
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
        """Remember this full block, so that later prefixes can find it. Return the block's name, under which its
        children are remembered."""
        key = (parent, tokens)
        existing = self._remembered.get(key)
        if existing is not None:  # computed twice in parallel: keep the first; this one is freed when released
            return self._names[existing]
        name = self._next_name
        self._next_name += 1
        self._remembered[key] = block
        self._keys[block] = key
        self._names[block] = name
        return name

    def release(self, blocks: list[int]) -> None:
        """Give back a sequence's blocks, which are given in order. The last are evicted first, since a prefix is
        useless without its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def forget_all(self) -> None:
        """Ensure that no block computed so far is found again. Blocks that are held stay with their holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._remembered.clear()
        self._keys = [None] * self.count
        self._names = [NO_NAME] * self.count
        self._roots.clear()

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._remembered[key]
        self._keys[block] = None
        self._names[block] = NO_NAME
