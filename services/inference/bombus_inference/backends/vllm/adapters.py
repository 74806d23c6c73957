"""The adapters that a vLLM server serves beside its policy, each through vLLM's own `LoRARequest`.

vLLM knows each adapter by the name of our copy of it. Every copy gets a new name, so vLLM's cache never returns
anything that was computed with another copy.

The policy itself is served with an adapter of zeros, because on a CPU, if any row of a pass has an adapter, rows
without one get the adapter in vLLM's last slot (vLLM 0.32).
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx

from bombus.errors import Code, EngineFault, Refused
from bombus_inference.backends.adapter_store import AdapterStore
from bombus_inference.backends.protocol import AdapterUse
from bombus_inference.backends.vllm.adapter_files import AdapterRules, CopiedAdapter, copy_adapter, write_zeros

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
ZEROS = "zeros"  # the adapter that changes nothing
REASON_CHARS_MAX = 400

Post = Callable[[str, dict[str, object]], Awaitable[httpx.Response]]


class VllmAdapters:
    """The adapters of one child, with copies in `folder`. `post` sends a request to that child.

    The copies take at most `rules.bytes_max` on disk. vLLM keeps the newest adapters in memory, and rereads the others
    when a request names them.
    """

    def __init__(self, folder: Path, rules: AdapterRules, post: Post) -> None:
        self.store = AdapterStore[CopiedAdapter](rules.bytes_max)
        self._folder = folder
        self._rules = rules
        self._post = post
        self._copies = 0
        self._changing = asyncio.Lock()  # adapters are loaded one at a time, which limits disk use

    async def begin(self) -> None:
        """Load the adapter of zeros. Raises `EngineFault`."""
        folder = self._folder / ZEROS
        await asyncio.to_thread(write_zeros, folder, self._rules.shapes)
        try:
            await self._send(LOAD, {"lora_name": ZEROS, "lora_path": str(folder)})
        except Refused as refused:
            raise EngineFault(f"this vLLM does not serve LoRA adapters on this model: {refused.why}") from refused

    @contextlib.contextmanager
    def using(self, address: str) -> Iterator[str]:
        """Keep an adapter loaded while a request uses it, and yield its name in vLLM. The address "" means the policy
        itself.

        Raises `Refused` if the adapter is not loaded.
        """
        if not address:
            yield ZEROS
            return
        self.store.use(address)
        used = self.store.find(address)
        assert used is not None
        try:
            yield used.folder.name
        finally:
            self.store.release(address)

    def listed(self) -> list[AdapterUse]:
        """Return the loaded adapters, least recently used first."""
        return [AdapterUse(address, each.bytes, each.uses) for address, each in self.store.items()]

    async def load(self, address: str, source: Path) -> bool:
        """Load an adapter. Return false if it was already loaded. Raises `Refused`."""
        async with self._changing:
            self._copies += 1
            folder = self._folder / f"{address[:16]}-{self._copies}"
            copied = await asyncio.to_thread(copy_adapter, address, source, folder, self._rules)
            kept = dict(self.store.items())
            dropped: list[str] | None = None
            try:
                if address not in kept:
                    await self._send(LOAD, {"lora_name": folder.name, "lora_path": str(folder)})
                dropped = self.store.put(address, copied)
            finally:
                if dropped is None:
                    await asyncio.shield(_remove(folder))
            for each in dropped or ():
                await self._forget(kept[each])
            return dropped is not None

    async def unload(self, address: str) -> None:
        """Drop an adapter. Raises `Refused` if requests are still using it, or if it is not loaded."""
        async with self._changing:
            loaded = self.store.find(address)
            self.store.remove(address)
            assert loaded is not None
            await self._forget(loaded)

    async def _forget(self, adapter: CopiedAdapter) -> None:
        await self._send(UNLOAD, {"lora_name": adapter.folder.name})
        await _remove(adapter.folder)

    async def _send(self, path: str, body: dict[str, object]) -> None:
        """Tell vLLM to load or unload an adapter. Raises `Refused` if vLLM does not do so."""
        try:
            response = await self._post(path, body)
        except httpx.HTTPError as error:
            why = f"the replica's vLLM did not answer {path}: {str(error) or type(error).__name__}; try again later"
            raise Refused(Code.NO_REPLICA, why) from error
        if response.status_code != 200:
            why = f"vLLM cannot serve this adapter: {response.text[:REASON_CHARS_MAX]}"
            raise Refused(Code.MALFORMED if response.status_code < 500 else Code.NO_REPLICA, why)


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
