"""What a gateway adds to traces: whose trace a call without one of its own belongs to, and what a call's span tells.

Its attributes are those of OpenTelemetry's conventions for generative AI, without messages, tools and keys.
"""

from bombus.hive.bounded import trim
from bombus.hive.events import AnyEvent, EpisodeClaimed
from bombus.hive.records import CallRecord
from bombus.hive.state import EngineState
from bombus.telemetry import Attributes

EPISODES_KEPT = 100_000


class EpisodeTraces:
    """The traces in which the newest episodes were claimed. Agents whose clients send no context are traced in them."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def note(self, event: AnyEvent, traceparent: str) -> None:
        """Note an event that was folded, and its trace."""
        if isinstance(event, EpisodeClaimed) and traceparent:
            self._of.update(dict.fromkeys(event.episodes, traceparent))
            trim(self._of, EPISODES_KEPT)

    def of(self, episode: str) -> str:
        """Return the traceparent of an episode, or "" if there is none."""
        return self._of.get(episode, "")


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
