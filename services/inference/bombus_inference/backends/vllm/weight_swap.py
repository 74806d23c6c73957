"""An extension of vLLM's workers. It is copied to the child's folder and loaded there, so it must not import bombus."""

from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class WeightSwap:
    """A mixin for vLLM's worker (`--worker-extension-cls`), whose methods are called through `/collective_rpc`."""

    def swap_model(self, weights_path: str) -> None:
        """Replace the model that every request uses, including running requests.

        On a CPU, vLLM computes with a packed copy of each layer. Its `reload_weights` repacks only layers that have
        tensors in the file. An output layer that shares the embedding's weights has none, so it is repacked here (vLLM
        0.32).
        """
        self.reload_weights(weights_path=weights_path)  # type: ignore[attr-defined]
        for layer in self.get_model().modules():  # type: ignore[attr-defined]
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)

    def swap_adapter(self, name: str, path: str) -> None:
        """Replace the adapter that every request uses, including running requests.

        vLLM's own route can do this too (`load_inplace`), but later requests then carry that flag, and the adapter is
        reread from its files in every step.
        """
        if not self.add_lora(LoRARequest(name, 1, path, load_inplace=True)):  # type: ignore[attr-defined]
            raise RuntimeError(f"the adapter in {path} was not loaded")
