"""Checks that a folder has the adapter that an address means, before a backend reads it."""

import re
from pathlib import Path

from bombus.errors import Code, EngineFault, Refused
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus.weights.deltas import TensorFile, file_sha256
from bombus.weights.lora_folders import PeftConfig, peft_config

_ADDRESS = re.compile(r"[0-9a-f]{64}")


def check_address(address: str) -> None:
    """Raise `Refused` for what cannot be the address of an adapter."""
    if not _ADDRESS.fullmatch(address):
        raise Refused(Code.MALFORMED, f"{address[:80]!r} is not the address of an adapter: 64 hexadecimal digits")


def check_size(file: Path, bytes_max: int) -> None:
    """Raise `Refused` for a file that has no room."""
    size = file.stat().st_size
    if size > bytes_max:
        raise Refused(
            Code.TOO_LARGE, f"{file} has {size} bytes; this replica has room for {bytes_max} by --adapters-mb"
        )


def check_content(file: Path, address: str) -> None:
    """Raise `Refused` unless a file has the content that `address` is the SHA-256 of."""
    found = file_sha256(file)
    if found != address:
        why = f"{file} has the address {found} and not {address}: it is damaged, or was written again. Save it again"
        raise Refused(Code.MALFORMED, why)


def adapter_config(folder: Path) -> PeftConfig:
    """Return the configuration of the adapter in `folder`, which is also that in its file's metadata if one is there.

    Raises `EngineFault`.
    """
    config = peft_config(folder)
    with TensorFile(folder / ADAPTER_FILE) as file:
        inside = file.metadata.get(ADAPTER_CONFIG)
    if inside is not None and inside != (folder / ADAPTER_CONFIG).read_text():
        raise EngineFault(f"its {ADAPTER_CONFIG} is not the one in the metadata of {ADAPTER_FILE}")
    return config
