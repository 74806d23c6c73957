"""A CPU platform for verl, which does not have one. Importing this module adds it to verl's registry."""

from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """Implements verl's interface to a device. On a CPU, most methods have nothing to do."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return False  # so verl leaves an accelerator's generator and memory alone

    def current_device(self) -> str:
        return "cpu"  # verl passes this to Tensor.to, which would read a number as a GPU's

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> nullcontext[None]:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


if PlatformRegistry.get("cpu") is None:
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
