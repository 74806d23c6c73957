"""What a call's span tells, by OpenTelemetry's conventions for generative AI: no messages, tools or keys."""

from bombus.hive.records import CallRecord
from bombus.hive.state import EngineState
from bombus.telemetry import Attributes


def attributes_of(record: CallRecord, engine: EngineState) -> Attributes:
    """Return what a span tells about a recorded call."""
    sampling, timings = record.sampling, record.timings
    versions = [span.version for choice in record.choices for span in choice.spans]
    found: Attributes = {
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": [str(choice.finish) for choice in record.choices],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens(),
        "gen_ai.request.choice.count": len(record.choices),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "bombus.engine": record.engine,
        "bombus.outcome": str(record.status),
        "bombus.replica": record.replica,
        "bombus.policy_versions": sorted(set(versions)),
    }
    if engine.active is not None:
        found |= {"gen_ai.request.model": engine.active.model, "gen_ai.response.model": engine.active.model}
    if timings.first_token_ns:
        found["gen_ai.response.time_to_first_chunk"] = (timings.first_token_ns - timings.received_ns) / 1e9
    return found
