"""What becomes of a client's sampling parameters: obeyed, overridden, or refused, as the job says."""

import pytest

from bombus.config.job import RolloutConfig
from bombus.errors import Code, Refused
from bombus.hive.events import EpisodeType
from bombus_gateway.call.policy import SamplingDecision, decide
from bombus_gateway.call.request import CompletionRequest, InvalidField, RequestedSampling, Unsupported

OVERRIDE, REFUSE, OBEY = (RolloutConfig(sampling=how) for how in ("override", "refuse", "obey"))
BIASED = {
    "temperature": RequestedSampling(temperature=0.0),
    "top_p": RequestedSampling(top_p=0.9),
    "top_k": RequestedSampling(top_k=5),
    "min_p": RequestedSampling(min_p=0.1),
    "presence_penalty": RequestedSampling(presence_penalty=1.0),
    "frequency_penalty": RequestedSampling(frequency_penalty=-1.0),
    "repetition_penalty": RequestedSampling(repetition_penalty=1.1),
    "logit_bias": RequestedSampling(logit_bias={3: -100.0}),
}
FORCED = Unsupported("tool_choice", "a call cannot be forced on the model")


def decided(
    sampling: RequestedSampling,
    rollout: RolloutConfig,
    type: EpisodeType = EpisodeType.TRAIN,
    *unsupported: Unsupported,
) -> SamplingDecision:
    return decide(CompletionRequest(chat=True, sampling=sampling, unsupported=unsupported), rollout, type, "main-1-1")


@pytest.mark.parametrize("name", BIASED)
def test_what_biases_a_training_episode_is_overridden_refused_or_obeyed(name: str) -> None:
    """A harness that has temperature 0 written into it could not be trained."""
    sampling = BIASED[name]
    assert decided(sampling, OVERRIDE) == (RequestedSampling(), (name,))
    assert decided(sampling, OBEY) == (sampling, ())
    with pytest.raises(InvalidField, match=f"{name} is refused in a training episode") as refused:
        decided(sampling, REFUSE)
    assert refused.value.field == name


@pytest.mark.parametrize("rollout", [OVERRIDE, REFUSE, OBEY])
@pytest.mark.parametrize("name", BIASED)
def test_an_evaluation_is_obeyed(name: str, rollout: RolloutConfig) -> None:
    assert decided(BIASED[name], rollout, EpisodeType.EVAL) == (BIASED[name], ())


@pytest.mark.parametrize("rollout", [OVERRIDE, REFUSE, OBEY])
def test_a_temperature_is_obeyed_because_its_logprobs_are_exact(rollout: RolloutConfig) -> None:
    sampling = RequestedSampling(temperature=0.7, max_tokens=5)
    assert decided(sampling, rollout) == (sampling, ())


def test_a_temperature_too_small_for_logprobs_is_overridden_in_training_and_refused_in_an_evaluation() -> None:
    sampling = RequestedSampling(temperature=1e-8)
    assert decided(sampling, OVERRIDE) == (RequestedSampling(), ("temperature",))
    for rollout, type in ((OVERRIDE, EpisodeType.EVAL), (OBEY, EpisodeType.TRAIN)):
        with pytest.raises(Refused, match="use 0 for the most likely token, or at least") as refused:
            decided(sampling, rollout, type)
        assert refused.value.code == Code.MALFORMED


def test_a_job_at_temperature_0_has_no_value_to_override_with() -> None:
    with pytest.raises(InvalidField, match="temperature"):
        decided(RequestedSampling(), RolloutConfig(temperature=0.0))


def test_what_nobody_can_do_is_left_out_and_named_once_or_refused() -> None:
    assert decided(RequestedSampling(), OVERRIDE, EpisodeType.EVAL, FORCED, FORCED).overridden == ("tool_choice",)
    with pytest.raises(InvalidField, match="tool_choice is not supported here: a call cannot be forced") as refused:
        decided(RequestedSampling(), RolloutConfig(unsupported="refuse"), EpisodeType.EVAL, FORCED)
    assert "rollout.unsupported" in refused.value.why


def test_a_part_of_a_conversation_is_left_out_of_training_only_where_the_job_says_so() -> None:
    image = Unsupported("messages.0.content.1", "a content part of type 'image_url' is not text", is_content=True)
    with pytest.raises(InvalidField, match=r"messages\.0\.content\.1 is refused in a training episode") as refused:
        decided(RequestedSampling(), RolloutConfig(), EpisodeType.TRAIN, FORCED, image)
    assert "rollout.unsupported to `relax`" in refused.value.why
    both = ("messages.0.content.1", "tool_choice")
    assert decided(RequestedSampling(), RolloutConfig(), EpisodeType.EVAL, FORCED, image).overridden == both
    relaxed = RolloutConfig(unsupported="relax")
    assert decided(RequestedSampling(), relaxed, EpisodeType.TRAIN, FORCED, image).overridden == both


def test_names_that_a_client_has_made_up_fit_into_a_header() -> None:
    strange = Unsupported("x\r\nset-cookie: é" + "y" * 1000, "nobody knows it")
    (name,) = decided(RequestedSampling(), OVERRIDE, EpisodeType.EVAL, strange).overridden
    assert name.isascii()
    assert name.isprintable()
    assert len(name) == 256
    many = [Unsupported(f"f{number}", "nobody knows it") for number in range(1000)]
    assert len(decided(RequestedSampling(), OVERRIDE, EpisodeType.EVAL, *many).overridden) == 32
