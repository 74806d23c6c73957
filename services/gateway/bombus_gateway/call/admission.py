"""Checks that a call may be made: its episode is open, the log has room, and the job allows what the call requests."""

from collections.abc import Sequence

import msgspec

from bombus.bus.follow import Follower
from bombus.config.job import RunConfig
from bombus.errors import Code, Refused
from bombus.hive.events import EpisodeType, SamplerWeights
from bombus.hive.records import CallRef
from bombus.hive.state import EngineState, Hive, Phase
from bombus_gateway.call.models import EngineModels
from bombus_gateway.call.request import (
    CallRequest,
    CompletionRequest,
    InvalidField,
    PromptTooLong,
    Unsupported,
)
from bombus_gateway.keys import KeyClaims
from bombus_gateway.limits import CHARACTERS_FOR_A_TOKEN
from bombus_gateway.text.rendering import TextModel
from bombus_gateway.text.words import strings

EPISODE_CATCH_UP_S = 2.0  # how long a call waits for the event of its episode's claim to reach this gateway
_CLAIM = "claim another one"
_NO_VARIABLE = "the model's chat template has no such variable"
_SET_BY_JOB = "the job's model.chat_template_kwargs says how much the model thinks"
_SET_BY_REQUEST = "the request's own chat_template_kwargs say how much the model thinks"


class Admitted(msgspec.Struct, frozen=True):
    """An admitted call's engine, the engine's job, the job's text model, and the call's open episode.

    `constrains` is true if the request asks for structured output and one of the engine's replicas supports it. In a
    run of training operations, `sampler` names the weights that the episode's calls sample from.
    """

    engine: EngineState
    job: RunConfig
    model: TextModel
    episode: str
    type: EpisodeType
    constrains: bool = False
    sampler: SamplerWeights | None = None

    @property
    def recorded(self) -> Sequence[CallRef]:
        """The episode's calls on the log, as far as this gateway has followed the log."""
        episode = self.engine.open.get(self.episode)
        return [call.ref for call in episode.calls] if episode is not None else ()

    @property
    def tokens_max(self) -> int:
        """The length of the longest sequence that the job and its model allow, in tokens."""
        return min(self.job.rollout.max_model_len, self.model.context_tokens)

    @property
    def characters_max(self) -> int:
        """The maximum number of characters in a prompt. If a body has no more bytes than this, its characters need not
        be counted."""
        return CHARACTERS_FOR_A_TOKEN * self.tokens_max

    def check_characters(self, request: CompletionRequest) -> None:
        """Raise `InvalidField` PROMPT_TOO_LONG if the text is longer than the model's context can hold. Call this
        before encoding the text.

        Tools are counted as JSON, because templates write them that way.
        """
        tokens, limit = self.tokens_max, self.characters_max
        count = sum(map(len, strings(request.messages))) + len(msgspec.json.encode(request.tools))
        count += len(request.prompt) if isinstance(request.prompt, str) else 0
        if count > limit or (isinstance(request.prompt, list) and len(request.prompt) > tokens):
            raise PromptTooLong(
                request.input_field,
                f"This model's maximum context length is {tokens} tokens, for which up to {limit} characters are "
                f"accepted. However, your messages have {count} characters. Please reduce the length of the messages.",
                max(count // CHARACTERS_FOR_A_TOKEN, tokens + 1),
                tokens,
            )


class Admission:
    """Admits requests on the basis of the folded log: `check_episode` before the body is read, `admit` once the whole
    request is known."""

    def __init__(self, follower: Follower, models: EngineModels) -> None:
        self._follower = follower
        self._models = models

    def check_episode(self, claims: KeyClaims) -> None:
        """Raise `Refused` EPISODE_OVER if a key's episode is known to be over."""
        check_not_over(self._follower.hive.engine(claims.engine), claims)

    def is_over(self, engine: str, run: int, episode: str) -> bool:
        """Return whether an episode of this engine and run is known to be over."""
        return _is_over(self._follower.hive.engine(engine), run, episode)

    async def admit(self, request: CallRequest) -> tuple[CallRequest, Admitted]:
        """Return the request, with its thinking options resolved according to the job, and the state that the call
        needs.

        Raises `Refused` unless the call may be made now.
        """
        claims = request.claims
        check_storage(self._follower.hive)
        engine = await self._engine(claims)
        job = self._models.job(engine)
        episode = engine.open[claims.episode]
        check_variables(request.completion, job)
        model = await self._models.text_model(engine)
        demands = bool(request.completion.demands)
        constrains = demands and any(replica.constrains for replica in engine.usable.values())
        admitted = Admitted(engine, job, model, claims.episode, episode.type, constrains, episode.sampler)
        return _with_thinking(request, job, model), admitted

    async def _engine(self, claims: KeyClaims) -> EngineState:
        """Return the engine of an open episode. If the episode may only just have been claimed, wait a moment for its
        claim."""
        state = self._follower.hive.engine(claims.engine)
        check_not_over(state, claims)
        if claims.episode in state.open:
            return state
        try:
            await self._follower.wait_for(lambda hive: is_known(hive.engine(claims.engine), claims), EPISODE_CATCH_UP_S)
        except TimeoutError:
            raise Refused(
                Code.BUS_DOWN, f"This gateway does not know episode {claims.episode} yet; try again in a moment."
            ) from None
        state = self._follower.hive.engine(claims.engine)
        check_not_over(state, claims)
        return state


def _with_thinking(request: CallRequest, job: RunConfig, model: TextModel) -> CallRequest:
    """Return the request with its `thinking` translated into variables of the chat template. Pure.

    Variables that the request itself sets are kept. If the job does not allow requests to set variables, the job's
    variables are kept. A thinking option that has no variable, or that contradicts a kept variable, is added to
    `unsupported`.
    """
    completion = request.completion
    if completion.thinking is None:
        return request
    variables, fields = model.renderer.thinking.given(completion.thinking)
    own, is_free = completion.chat_template_kwargs, job.rollout.allow_chat_template_kwargs
    fixed = own if is_free else job.model.chat_template_kwargs
    unmet = [Unsupported(field, _NO_VARIABLE) for field in fields]
    if any(fixed.get(name, value) != value for name, value in variables.items()):
        unmet.append(Unsupported(completion.thinking.field, _SET_BY_REQUEST if is_free else _SET_BY_JOB))
    free = {name: value for name, value in variables.items() if name not in fixed}
    unsupported = (*completion.unsupported, *unmet)
    settled = msgspec.structs.replace(
        completion, chat_template_kwargs={**own, **free}, thinking=None, unsupported=unsupported
    )
    return msgspec.structs.replace(request, completion=settled)


def check_storage(hive: Hive) -> None:
    """Raise `Refused` STORAGE_FULL while the remaining space is reserved for work in progress."""
    if hive.refusing:
        raise Refused(Code.STORAGE_FULL, f"{hive.refusing} Try again when there is room.")


def check_not_over(engine: EngineState, claims: KeyClaims) -> None:
    """Raise `Refused` EPISODE_OVER if a key's episode is known to be over. The authoritative check is made by the log
    (R18)."""
    if not _is_over(engine, claims.run, claims.episode):
        return
    if engine.run > claims.run or engine.phase == Phase.OFFLINE:
        raise Refused(
            Code.EPISODE_OVER,
            f"Episode {claims.episode} is over: run {claims.run} of engine {claims.engine} has ended; {_CLAIM}.",
        )
    closed = engine.closed.get(claims.episode)
    how = "has been ended" if closed is None or closed.aborted is None else f"was aborted ({closed.aborted})"
    raise Refused(Code.EPISODE_OVER, f"Episode {claims.episode} {how}; {_CLAIM}.")


def _is_over(engine: EngineState, run: int, episode: str) -> bool:
    return engine.run > run or (engine.run == run and (engine.phase == Phase.OFFLINE or engine.is_over(episode)))


def check_variables(request: CompletionRequest, job: RunConfig) -> None:
    """Raise `InvalidField` if the request sets chat template variables but the job does not allow this."""
    if request.chat_template_kwargs and not job.rollout.allow_chat_template_kwargs:
        raise InvalidField(
            Code.UNSUPPORTED,
            "chat_template_kwargs",
            "chat_template_kwargs is not allowed: this job renders all conversations alike. Leave it out, or set in "
            "the job model.chat_template_kwargs for all of them, or rollout.allow_chat_template_kwargs to let each "
            "request choose.",
        )


def is_known(engine: EngineState, claims: KeyClaims) -> bool:
    """Return whether the folded log contains the claim of a key's episode, which is then either open or over."""
    if engine.run != claims.run:
        return engine.run > claims.run
    return engine.next_episode > (engine.episode_number(claims.episode) or 0)
