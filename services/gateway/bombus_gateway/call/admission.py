"""What must hold before a call is made: the key, its episode, room in the log, and the limits of the job."""

from dataclasses import dataclass
from hashlib import blake2b

from bombus.bus.follow import Follower
from bombus.config.job import RunConfig
from bombus.errors import Code, Refused
from bombus.hive.events import EpisodeType
from bombus.hive.records import LengthLimit, SamplingParams
from bombus.hive.state import EngineState, Hive, Phase
from bombus_gateway.call.models import EngineModels
from bombus_gateway.call.request import CallRequest, CompletionRequest, InvalidField
from bombus_gateway.keys import KeyClaims
from bombus_gateway.limits import CHARACTERS_FOR_A_TOKEN
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.words import strings

EPISODE_NEWS_S = 2.0  # how long the event of a claim may take to arrive here when its key is already in use
_CLAIM = "claim another one"


@dataclass(frozen=True)
class Room:
    """How many tokens an answer may have, and what it is that allows no more."""

    tokens: int
    limit: LengthLimit

    def limit_at(self, tokens: int) -> LengthLimit:
        """Return what ended an answer of so many tokens for its length: fewer than ours are the replica's limit."""
        return LengthLimit.REPLICA if tokens < self.tokens else self.limit


@dataclass(frozen=True)
class Admitted:
    """What a call works with: its engine, the engine's job, the job's text model, and its open episode."""

    engine: EngineState
    job: RunConfig
    model: TextModel
    episode: str
    type: EpisodeType

    def check_characters(self, request: CompletionRequest, body_bytes: int) -> None:
        """Raise `InvalidField` PROMPT_TOO_LONG for more text than the model's length can hold, before it is encoded.

        A body of fewer bytes has fewer characters.
        """
        tokens = min(self.job.rollout.max_model_len, self.model.context_tokens)
        limit = CHARACTERS_FOR_A_TOKEN * tokens
        if body_bytes <= limit:
            return
        count = sum(map(len, strings([request.messages, request.tools])))
        count += len(request.prompt) if isinstance(request.prompt, str) else 0
        if count > limit or (isinstance(request.prompt, list) and len(request.prompt) > tokens):
            raise InvalidField(
                Code.PROMPT_TOO_LONG,
                request.input_field,
                f"This model's maximum context length is {tokens} tokens, for which up to {limit} characters are "
                f"taken. However, your messages have {count} characters. Please reduce the length of the messages.",
            )

    def room(self, request: CompletionRequest, prompt_tokens: int, answered_tokens: int, is_first: bool) -> Room:
        """Return the room for an answer. Pure.

        The job's max_prompt_length limits what comes before any answer (`is_first`). Later turns hold answers too, and
        only the model's length limits them. The `answered_tokens` are those that were sampled earlier in the same
        conversation; the job's max_response_length is for all of its answers. Raises `InvalidField` PROMPT_TOO_LONG.
        """
        rollout = self.job.rollout
        if is_first and prompt_tokens > rollout.max_prompt_length:
            raise InvalidField(
                Code.PROMPT_TOO_LONG,
                request.input_field,
                f"The prompt has {prompt_tokens} tokens; the job's max_prompt_length is {rollout.max_prompt_length}.",
            )
        rooms = (
            Room(rollout.max_response_length_in_one_turn, LengthLimit.TURN),
            Room(rollout.max_response_length - answered_tokens, LengthLimit.EPISODE),
            Room(rollout.max_model_len - prompt_tokens, LengthLimit.JOB),
            Room(self.model.context_tokens - prompt_tokens, LengthLimit.CONTEXT),
        )
        room = min(rooms, key=lambda each: each.tokens)
        if room.tokens < 1:
            raise InvalidField(
                Code.PROMPT_TOO_LONG, request.input_field, self._no_room(room, prompt_tokens, answered_tokens)
            )
        if request.max_tokens and request.max_tokens < room.tokens:
            return Room(request.max_tokens, LengthLimit.REQUEST)
        return room

    def sampling(self, request: CompletionRequest, room: Room) -> SamplingParams:
        """Return how the request's tokens are drawn. Pure.

        In a training episode a seed is mixed with the episode: with the same random numbers the answers of a group
        would be equal, and there would be nothing to compare.
        """
        rollout = self.job.rollout
        mixed = request.seed is not None and self.type == EpisodeType.TRAIN
        return SamplingParams(
            max_tokens=room.tokens,
            temperature=rollout.temperature if request.temperature is None else request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=seed_of_episode(request.seed or 0, self.episode) if mixed else request.seed,
            stop_token_ids=self.model.renderer.stop_token_ids,
            top_logprobs=request.top_logprobs,
        )

    def _no_room(self, room: Room, prompt_tokens: int, answered_tokens: int) -> str:
        if room.limit == LengthLimit.EPISODE:
            return (
                f"The answers of this conversation have {answered_tokens} tokens, and the job's max_response_length "
                f"for all of them is {self.job.rollout.max_response_length}: end the episode, or raise the limit."
            )
        limit = min(self.job.rollout.max_model_len, self.model.context_tokens)
        return (
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages."
        )


def seed_of_episode(seed: int, episode: str) -> int:
    """Return a seed of 48 bits that belongs to this seed in this episode."""
    return int.from_bytes(blake2b(f"{seed}/{episode}".encode(), digest_size=6).digest())


class Admission:
    """Decides on requests by the folded log: `check_episode` before a body is read, `admit` with the whole request."""

    def __init__(self, follower: Follower, models: EngineModels) -> None:
        self._follower = follower
        self._models = models

    def check_episode(self, claims: KeyClaims) -> None:
        """Raise `Refused` EPISODE_OVER when a key's episode is known to be over."""
        check_not_over(self._follower.hive.engine(claims.engine), claims)

    async def admit(self, request: CallRequest) -> Admitted:
        """Raise `Refused` unless a call may be made for this request now."""
        claims = request.claims
        check_storage(self._follower.hive)
        engine = await self._engine(claims)
        job = self._models.job(engine)
        episode = engine.open[claims.episode]
        check_unbiased(request.completion, job, episode.type)
        check_variables(request.completion, job)
        return Admitted(engine, job, await self._models.text_model(engine), claims.episode, episode.type)

    async def _engine(self, claims: KeyClaims) -> EngineState:
        """Return the engine of an open episode, waiting a moment for an episode that was claimed just now."""
        state = self._follower.hive.engine(claims.engine)
        check_not_over(state, claims)
        if claims.episode in state.open:
            return state
        try:
            await self._follower.wait_for(lambda hive: is_known(hive.engine(claims.engine), claims), EPISODE_NEWS_S)
        except TimeoutError:
            raise Refused(
                Code.BUS_DOWN, f"This gateway has not heard of episode {claims.episode} yet; try again in a moment."
            ) from None
        state = self._follower.hive.engine(claims.engine)
        check_not_over(state, claims)
        return state


def check_storage(hive: Hive) -> None:
    """Raise `Refused` STORAGE_FULL while the space that is left is kept for what has begun."""
    if hive.refusing:
        raise Refused(Code.STORAGE_FULL, f"{hive.refusing} Try again when there is room.")


def check_not_over(engine: EngineState, claims: KeyClaims) -> None:
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


def check_unbiased(request: CompletionRequest, job: RunConfig, episode: EpisodeType) -> None:
    """Raise `InvalidField` for what would bias the gradient, in training episodes, unless the job allows it."""
    if episode != EpisodeType.TRAIN or job.rollout.allow_biased_sampling:
        return
    temperature = job.rollout.temperature if request.temperature is None else request.temperature
    for name, biased in (
        ("top_p", request.top_p < 1),
        ("top_k", request.top_k > 0),
        ("temperature", temperature == 0),
    ):
        if biased:
            raise InvalidField(
                Code.UNSUPPORTED,
                name,
                f"{name} is refused in a training episode: tokens would not be drawn from the policy that is trained, "
                "which biases the gradient. Leave it out, claim an eval episode, or set "
                "rollout.allow_biased_sampling in the job.",
            )


def check_variables(request: CompletionRequest, job: RunConfig) -> None:
    """Raise `InvalidField` for variables of the chat template, unless the job allows requests to give them."""
    if request.chat_template_kwargs and not job.rollout.allow_chat_template_kwargs:
        raise InvalidField(
            Code.UNSUPPORTED,
            "chat_template_kwargs",
            "chat_template_kwargs is refused: this job renders all conversations alike. Leave it out, or set in the "
            "job model.chat_template_kwargs for all of them, or rollout.allow_chat_template_kwargs to let each "
            "request choose.",
        )


def is_known(engine: EngineState, claims: KeyClaims) -> bool:
    """Whether the fold has the claim of a key's episode: it is open, or over."""
    if engine.run != claims.run:
        return engine.run > claims.run
    return engine.next_episode > (engine.episode_number(claims.episode) or 0)
