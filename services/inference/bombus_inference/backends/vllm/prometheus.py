"""Translates vLLM's metrics to a replica's metric names."""

NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_ratio",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:prompt_tokens_total": "prefill_tokens_total",
    "vllm:generation_tokens_total": "decode_tokens_total",
    "vllm:prefix_cache_queries_total": "prefix_queried_tokens_total",
    "vllm:prefix_cache_hits_total": "cached_tokens_total",
}


def vllm_metrics(text: str) -> dict[str, float]:
    """Return the metrics in `NAMES`, summed over vLLM's labels, and the prefix cache's token hit ratio."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        name = NAMES.get(series.partition("{")[0])
        if name is not None:
            values[name] = values.get(name, 0.0) + float(value)
    queried = values.get("prefix_queried_tokens_total", 0.0)
    if queried:
        values["prefix_hit_ratio"] = values.get("cached_tokens_total", 0.0) / queried
    return values
