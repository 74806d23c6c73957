"""Gives unused memory back to the device and to the machine."""

import ctypes
import gc
import sys

import torch


def give_back() -> None:
    """Free unreferenced memory, including the allocators' pools, where trainers under `bombus up` keep the memory they
    free."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # exists only in glibc
        if trim is not None:
            trim(0)
