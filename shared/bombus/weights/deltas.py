"""Deltas: the bit-exact changes between two versions of a model's safetensors file, stored as a safetensors file (R15).

The new values of each changed tensor are stored under its name, and the numbers of unchanged elements between them
under `gaps:<name>`. Values are compared and copied as bits, including NaN, -0.0 and denormals.
"""

import shutil
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import file_digest, sha256
from math import prod
from pathlib import Path
from typing import BinaryIO, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from bombus.errors import EngineFault
from bombus.hive.decoding import decoded
from bombus.hive.events import Weights

FULL_FORMAT = "safetensors"
FULL_FILE = "model.safetensors"
DELTA_FORMAT = "safetensors-delta"
DELTA_FILE = "delta.safetensors"
BASE = "base"  # metadata key: the version that a delta applies to, as the JSON of a `Weights`
GAPS = "gaps:"
HEADER_BYTES_MAX = 256 << 20
CHAIN_MAX = 1024
COMPARED = 1 << 22  # number of elements compared at once, which bounds the memory of a comparison

Bits = NDArray[np.unsignedinteger]
WIDTHS = {  # bytes per element, keyed by safetensors' name for the type
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, eq=False)
class Patch:
    """New bits for a tensor, as a flat array. Without `gaps`, they replace all of its elements.

    Each gap (uint8 or uint16) counts the elements skipped since the previous position, so 0 means the next element. If
    a gap is too wide for its type, an element in between is stored with its unchanged value.
    """

    values: Bits
    gaps: NDArray[np.uint8] | NDArray[np.uint16] | None

    @property
    def bytes(self) -> int:
        return self.values.nbytes + (0 if self.gaps is None else self.gaps.nbytes)

    def positions(self) -> NDArray[np.int64]:
        """Return the positions of `values` in the flat tensor, ascending."""
        if self.gaps is None:
            return np.arange(len(self.values))
        return np.cumsum(self.gaps.astype(np.int64) + 1) - 1


def patch_between(before: Bits, after: Bits) -> Patch | None:
    """Return the smallest patch that turns `before` into `after`, or None if they are equal.

    Both are flat arrays of the same length.
    """
    found = [
        start + np.flatnonzero(before[start : start + COMPARED] != after[start : start + COMPARED])
        for start in range(0, len(after), COMPARED)
    ]
    changed = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    if not len(changed):
        return None
    steps = np.diff(changed, prepend=-1)
    bytes_of = {
        kind: (len(steps) + int(_fillers(steps, kind).sum())) * (np.dtype(kind).itemsize + after.itemsize)
        for kind in (np.uint8, np.uint16)
    }
    kind = min(bytes_of, key=bytes_of.__getitem__)
    if bytes_of[kind] >= after.nbytes:
        return Patch(after.copy(), None)
    fillers = _fillers(steps, kind)
    reach = np.iinfo(kind).max + 1
    ends = np.cumsum(fillers + 1) - 1
    gaps = np.full(ends[-1] + 1, reach - 1, dtype=kind)
    gaps[ends] = steps - fillers * reach - 1
    return Patch(after[np.cumsum(gaps.astype(np.int64) + 1) - 1], gaps)


def _fillers(steps: NDArray[np.int64], kind: type[np.unsignedinteger]) -> NDArray[np.int64]:
    """Return how many unchanged elements must be stored before each changed element because its gap is too wide."""
    return (steps - 1) // (np.iinfo(kind).max + 1)


def apply_patch(patch: Patch, onto: Bits) -> None:
    """Patch a flat tensor in place. Raises `EngineFault` if the patch is for a tensor of a different size or type."""
    where = patch.positions()
    fits = len(where) == len(patch.values) and (not len(where) or where[-1] < len(onto))
    if not fits or onto.dtype != patch.values.dtype or (patch.gaps is None and len(onto) != len(where)):
        raise EngineFault(f"a delta that changes {len(patch.values)} values does not fit a tensor of {len(onto)}")
    onto[where] = patch.values


# ---- files --------------------------------------------------------------------------------------------------------


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_head = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata = msgspec.json.Decoder(dict[str, str])
_entry = msgspec.json.Decoder(_Entry)
_base = msgspec.json.Decoder(Weights)


class TensorFile:
    """A safetensors file open for reading, which returns tensors as flat bits.

    Raises `EngineFault` if the file cannot be read or is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise EngineFault(f"{path} cannot be read: {error.strerror}") from error
        try:
            self.head, self.metadata, self._entries = self._read_head()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of their data in the file."""
        return sorted(self._entries, key=lambda name: self._entries[name].data_offsets)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def bits(self, name: str) -> Bits:
        """Return a tensor's elements as a new flat array of unsigned integers of the same width."""
        entry = self._entries[name]
        start, end = entry.data_offsets
        content = bytearray(end - start)
        self._file.seek(len(self.head) + start)
        if self._file.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise self._fault("it ends too early")
        return np.frombuffer(content, dtype=UNSIGNED[WIDTHS[entry.dtype]])

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def _read_head(self) -> tuple[bytes, Mapping[str, str], dict[str, _Entry]]:
        start = self._file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_BYTES_MAX + 1
        text = self._file.read(length) if length <= HEADER_BYTES_MAX else b""
        if len(text) != length:
            raise self._fault("it has no header")
        try:
            raw = decoded(_head.decode, text)
            metadata = decoded(_metadata.decode, raw.pop("__metadata__", msgspec.Raw(b"{}")))
            entries = {name: decoded(_entry.decode, each) for name, each in raw.items()}
        except msgspec.MsgspecError as error:
            raise self._fault(str(error)) from error
        size = self._path.stat().st_size - len(start) - length
        for name, entry in entries.items():
            begin, end = entry.data_offsets
            width = WIDTHS.get(entry.dtype, 0)
            if not width or not 0 <= begin <= end <= size or end - begin != width * prod(entry.shape):
                raise self._fault(f"{name} is {entry.dtype} {list(entry.shape)} in {end - begin} bytes")
        return start + text, metadata, entries

    def _fault(self, why: str) -> EngineFault:
        return EngineFault(f"{self._path} is not a safetensors file: {why}")


class DeltaFile(TensorFile):
    """A delta open for reading."""

    def base(self) -> Weights:
        """Return the version to which the delta applies, as described on the log. Raises `EngineFault` if the delta
        does not name one."""
        try:
            return decoded(_base.decode, self.metadata.get(BASE, ""))
        except msgspec.MsgspecError as error:
            raise EngineFault(f"{self._path} does not name the version that it applies to: {error}") from error

    def patches(self) -> Iterator[tuple[str, Patch]]:
        """Yield the name and the patch of each changed tensor."""
        for name in self.names:
            if not name.startswith(GAPS):
                yield name, self.patch(name)

    def patch(self, name: str) -> Patch:
        return Patch(self.bits(name), self.bits(GAPS + name) if GAPS + name in self else None)


def chain(weights: Weights, folder_of: Callable[[str], Path] = Path) -> list[Weights]:
    """Return a version and the versions that it builds on, newest first, back to a full copy. Only headers are read.

    Raises `EngineFault` if one of the deltas cannot be read.
    """
    if weights.adapter_of is not None:
        return [weights, weights.adapter_of]
    links = [weights]
    while links[-1].format == DELTA_FORMAT:
        if len(links) > CHAIN_MAX:
            raise EngineFault(f"{weights.where} builds on more than {CHAIN_MAX} deltas")
        with DeltaFile(folder_of(links[-1].where) / DELTA_FILE) as delta:
            links.append(delta.base())
    return links


async def deltas_below(newest: Path, delta_file: Callable[[Weights], Awaitable[Path]]) -> tuple[list[Path], Weights]:
    """Return the files of a delta and of the deltas that it builds on, oldest first, and the full copy on which they
    are all based.

    `delta_file` fetches and checks a delta. Raises `EngineFault` if a delta cannot be read.
    """
    files = [newest]
    while True:
        with DeltaFile(files[-1]) as delta:
            base = delta.base()
        if base.format != DELTA_FORMAT:
            return files[::-1], base
        if len(files) > CHAIN_MAX:
            raise EngineFault(f"{newest} needs more than {CHAIN_MAX} deltas")
        files.append(await delta_file(base))


def patched(base: TensorFile, deltas: Sequence[DeltaFile]) -> Iterator[tuple[str, Bits]]:
    """Yield the tensors of `base`, in the order of its file, after applying `deltas` (oldest first)."""
    for name in base.names:
        bits = base.bits(name)
        for delta in deltas:
            if name in delta:
                apply_patch(delta.patch(name), bits)
        yield name, bits


def rebuild(base: Path, deltas: Sequence[Path], into: Path) -> str:
    """Apply `deltas` (oldest first) to the full file `base`, write the result to `into`, and return its sha256.

    This takes one pass, with one tensor in memory at a time. `base` is never changed in place: an engine may have
    mapped it, and it must stay intact if a delta turns out to be wrong.
    """
    digest = sha256()
    with ExitStack() as stack, into.open("wb") as out:
        source = stack.enter_context(TensorFile(base))
        changes = [stack.enter_context(DeltaFile(delta)) for delta in deltas]
        out.write(source.head)
        digest.update(source.head)
        for _, bits in patched(source, changes):
            content = bits.view(np.uint8).data
            digest.update(content)
            out.write(content)
    return digest.hexdigest()


def copy_companions(version: Path, into: Path) -> None:
    """Copy all files of a version's folder except its tensors into the folder `into`."""
    into.mkdir(mode=0o700, exist_ok=True)
    for file in version.iterdir():
        if file.is_file() and file.name not in (FULL_FILE, DELTA_FILE):
            shutil.copyfile(file, into / file.name)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises `OSError` if it cannot be read."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
