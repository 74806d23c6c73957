"""Checks that a folder contains the adapter with a given address, before a backend reads it."""

import re
from pathlib import Path

from bombus.errors import Code, EngineFault, Refused
from bombus.weights.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from bombus.weights.deltas import TensorFile, file_sha256
from bombus.weights.lora_folders import PeftConfig, peft_config

_ADDRESS = re.compile(r"[0-9a-f]{64}")


def check_address(address: str) -> None:
    """Raise `Refused` unless `address` is well-formed."""
    if not _ADDRESS.fullmatch(address):
        raise Refused(Code.MALFORMED, f"{address[:80]!r} is not an adapter's address, which has 64 hexadecimal digits")


def check_size(file: Path, bytes_max: int) -> None:
    """Raise `Refused` for a file larger than `bytes_max`."""
    size = file.stat().st_size
    if size > bytes_max:
        raise Refused(
            Code.TOO_LARGE,
            f"{file} has {size} bytes, but this replica reads at most {bytes_max}: start it with a larger "
            "--adapters-mb",
        )


def check_content(file: Path, address: str) -> None:
    """Raise `Refused` unless `address` is the SHA-256 of the file's content."""
    found = file_sha256(file)
    if found != address:
        why = f"{file} has the address {found}, not {address}: it was damaged or overwritten. Save the adapter again"
        raise Refused(Code.MALFORMED, why)


def adapter_config(folder: Path) -> PeftConfig:
    """Return the configuration of the adapter in `folder`.

    Raises `EngineFault` if the configuration cannot be read or is not supported, or if it differs from a configuration
    in the metadata of the adapter's file.
    """
    config = peft_config(folder)
    with TensorFile(folder / ADAPTER_FILE) as file:
        inside = file.metadata.get(ADAPTER_CONFIG)
    if inside is not None and inside != (folder / ADAPTER_CONFIG).read_text():
        raise EngineFault(f"its {ADAPTER_CONFIG} is not the one in the metadata of {ADAPTER_FILE}")
    return config
