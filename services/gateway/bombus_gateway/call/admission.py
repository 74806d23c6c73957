"""What a request must hold to before anything is done for it: its key, its episode, its job's limits. Pure."""

from bombus.config.job import RunConfig
from bombus.errors import Code, Refused
from bombus.hive.events import EpisodeType
from bombus.hive.records import SamplingParams
from bombus.hive.state import EngineState, Hive, Phase
from bombus_gateway.keys import KeyClaims
from bombus_gateway.openai.request import Ask, BadParameter
from bombus_gateway.text.rendering import TextModel

_CLAIM = "claim another one"


def check_episode(engine: EngineState, claims: KeyClaims) -> None:
    """Raise `Refused` EPISODE_OVER when a key's episode is known to be over (R18: the log is the fence, not this)."""
    if engine.run > claims.run or (engine.run == claims.run and engine.phase == Phase.OFFLINE):
        raise Refused(
            Code.EPISODE_OVER,
            f"Episode {claims.episode} is over: run {claims.run} of engine {claims.engine} has ended; {_CLAIM}.",
        )
    if engine.run == claims.run and engine.is_over(claims.episode):
        closed = engine.closed.get(claims.episode)
        how = "has been ended" if closed is None or closed.aborted is None else f"was aborted ({closed.aborted})"
        raise Refused(Code.EPISODE_OVER, f"Episode {claims.episode} {how}; {_CLAIM}.")


def check_storage(hive: Hive) -> None:
    """Raise `Refused` STORAGE_FULL while what is left is kept for what is under way."""
    if hive.refusing:
        raise Refused(Code.STORAGE_FULL, f"{hive.refusing} Try again when there is room.")


def heard_of(engine: EngineState, claims: KeyClaims) -> bool:
    """Whether this fold knows what became of a key's episode: it is open, or over."""
    return engine.run > claims.run or (engine.run == claims.run and engine.next_episode > _number(engine, claims))


def _number(engine: EngineState, claims: KeyClaims) -> int:
    number = engine.episode_number(claims.episode)
    return 0 if number is None else number


def check_sampling(ask: Ask, job: RunConfig, episode: EpisodeType) -> None:
    """Refuse by name what would bias the gradient, in training episodes, unless the job allows it."""
    if episode != EpisodeType.TRAIN or job.rollout.allow_biased_sampling:
        return
    temperature = job.rollout.temperature if ask.temperature is None else ask.temperature
    for name, biased in (
        ("top_p", ask.top_p < 1),
        ("top_k", ask.top_k > 0),
        ("temperature", temperature == 0),
    ):
        if biased:
            raise BadParameter(
                Code.UNSUPPORTED,
                name,
                f"{name} is refused in a training episode: tokens would not be drawn from the policy that is trained, "
                "which biases the gradient. Leave it out, claim an eval episode, or set "
                "rollout.allow_biased_sampling in the job.",
            )


def sampling_of(ask: Ask, job: RunConfig, model: TextModel, prompt_tokens: int, is_first: bool) -> SamplingParams:
    """How this request's tokens are drawn. Raises `Refused` PROMPT_TOO_LONG.

    The job's max_prompt_length is for what comes before any answer (`is_first`); later turns hold answers too, and
    only the model's length limits them. What may be sampled is cut to what fits.
    """
    rollout = job.rollout
    limit = min(rollout.max_model_len, model.context_tokens)
    if is_first and prompt_tokens > rollout.max_prompt_length:
        raise BadParameter(
            Code.PROMPT_TOO_LONG,
            "messages" if ask.chat else "prompt",
            f"The prompt has {prompt_tokens} tokens; the job's max_prompt_length is {rollout.max_prompt_length}.",
        )
    room = limit - prompt_tokens
    if room < 1:
        raise BadParameter(
            Code.PROMPT_TOO_LONG,
            "messages" if ask.chat else "prompt",
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
        )
    wanted = min(ask.max_tokens or rollout.max_response_length_in_one_turn, rollout.max_response_length_in_one_turn)
    return SamplingParams(
        max_tokens=min(wanted, room),
        temperature=rollout.temperature if ask.temperature is None else ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=ask.seed,
        stop_token_ids=model.renderer.stop_token_ids,
        top_logprobs=ask.top_logprobs,
    )
