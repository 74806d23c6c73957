"""What vLLM's workers can do besides: copied beside the child and loaded there, so it needs vLLM alone, not bombus."""

from vllm.lora.request import LoRARequest


class AdapterSwap:
    """Mixed into vLLM's worker (`--worker-extension-cls`), called by `/collective_rpc`."""

    def swap_adapter(self, name: str, path: str) -> None:
        """Put another adapter in the place of the one that every request uses, those that are running too.

        vLLM's own route can do this as well (`load_inplace`), but the requests that come behind it carry the flag, and
        have the adapter read from its files again in every step.
        """
        if not self.add_lora(LoRARequest(name, 1, path, load_inplace=True)):  # type: ignore[attr-defined]
            raise RuntimeError(f"the adapter in {path} was not loaded")
