"""The budgets of a rollout: turns, tokens, seconds, and what fits into a turn. They are checked when they are made."""

import os
from functools import partial

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bombus.environments.variables import number_of

TURNS_VARIABLE = "MAX_TURNS"
TOKENS_VARIABLE = "MAX_TOTAL_TOKENS"
TURNS_MAX = 10_000
TOKENS_MAX = 10_000_000


class RolloutBudgets(BaseModel):
    """The limits of one episode. An episode that uses up its turns, its tokens or `episode_s` is truncated, and scored.

    The variables `MAX_TURNS` and `MAX_TOTAL_TOKENS`, if set, are the defaults of `turns_max` and `tokens_max`.

    In a class with `play`, `turns_max` counts the calls of all agents together, and `tokens_max` holds for each call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns_max: int = Field(
        default_factory=partial(number_of, os.environ, TURNS_VARIABLE, 6, 1, TURNS_MAX),
        ge=1,
        le=TURNS_MAX,
        description="answers of the model",
    )
    tokens_max: int = Field(
        default_factory=partial(number_of, os.environ, TOKENS_VARIABLE, 4096, 2, TOKENS_MAX),
        ge=2,
        le=TOKENS_MAX,
        description="tokens of the conversation: its newest prompt and the answer",
    )
    tool_s: float = Field(default=60.0, gt=0, le=86_400, description="seconds for one call of a tool")
    turn_s: float = Field(default=180.0, gt=0, le=86_400, description="seconds for an answer and the tools in it")
    episode_s: float = Field(default=420.0, gt=0, le=86_400, description="seconds for all turns")
    setup_s: float = Field(
        default=60.0, gt=0, le=86_400, description="seconds to make the environment new, to score it, and to close it"
    )
    tools_at_once: int = Field(default=8, ge=1, le=256, description="calls of one answer that run at the same time")
    calls_max: int = Field(default=32, ge=1, le=1024, description="calls of tools in one answer")
    tool_characters_max: int = Field(
        default=20_000, ge=100, le=10_000_000, description="characters of a tool's result that the model is shown"
    )

    @model_validator(mode="after")
    def _nested(self) -> "RolloutBudgets":
        if not self.tool_s <= self.turn_s <= self.episode_s:
            raise ValueError(
                f"tool_s is {self.tool_s:g}, turn_s {self.turn_s:g} and episode_s {self.episode_s:g}: a tool is part "
                "of a turn, and a turn is part of the episode: give tool_s <= turn_s <= episode_s"
            )
        return self
