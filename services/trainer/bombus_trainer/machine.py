"""Describes the machine. The last bits of sums depend on it, so a step may produce different bytes on another
machine."""

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def this_machine(device: str) -> str:
    """Describe this machine, such as `cpu: AMD EPYC 9654 (AVX512), torch 2.13.0, 2 threads`.

    If two machines have equal descriptions, a step should produce the same bytes on both.
    """
    if device == "cpu":
        unit = f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"
    else:
        unit = torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device}: {unit}, torch {torch.__version__}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
