"""An extension of vLLM's workers. It is copied to the child's folder and loaded there, so it must not import bombus."""

from vllm.lora.request import LoRARequest


class AdapterSwap:
    """Mixed into vLLM's worker (`--worker-extension-cls`) and called through `/collective_rpc`."""

    def swap_adapter(self, name: str, path: str) -> None:
        """Replace the adapter that every request uses, including running requests.

        vLLM's own route can do this too (`load_inplace`), but later requests then carry that flag, and the adapter is
        reread from its files in every step.
        """
        if not self.add_lora(LoRARequest(name, 1, path, load_inplace=True)):  # type: ignore[attr-defined]
            raise RuntimeError(f"the adapter in {path} was not loaded")
