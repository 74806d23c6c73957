"""The budgets of a rollout: turns, tokens, seconds, and the limits within a turn. They are validated when they are
created."""

import os
from functools import partial

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bombus.environments.variables import number_of

TURNS_VARIABLE = "MAX_TURNS"
TOKENS_VARIABLE = "MAX_TOTAL_TOKENS"
TURNS_MAX = 10_000
TOKENS_MAX = 10_000_000


class RolloutBudgets(BaseModel):
    """The limits of one episode. An episode that uses up its turns, its tokens or `episode_s` is truncated, but still
    scored.

    The variables `MAX_TURNS` and `MAX_TOTAL_TOKENS`, if set, are the defaults of `turns_max` and `tokens_max`.

    For a class with `play`, `turns_max` counts the calls of all agents together, and `tokens_max` applies to each call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns_max: int = Field(
        default_factory=partial(number_of, os.environ, TURNS_VARIABLE, 6, 1, TURNS_MAX),
        ge=1,
        le=TURNS_MAX,
        description="how many times the model may answer in an episode",
    )
    tokens_max: int = Field(
        default_factory=partial(number_of, os.environ, TOKENS_VARIABLE, 4096, 2, TOKENS_MAX),
        ge=2,
        le=TOKENS_MAX,
        description="how many tokens the newest prompt and its answer may have together",
    )
    tool_s: float = Field(default=60.0, gt=0, le=86_400, description="seconds one tool call may take")
    turn_s: float = Field(default=180.0, gt=0, le=86_400, description="seconds an answer and its tool calls may take")
    episode_s: float = Field(default=420.0, gt=0, le=86_400, description="seconds for all turns")
    setup_s: float = Field(
        default=60.0, gt=0, le=86_400, description="seconds each to reset the environment, to score it, and to close it"
    )
    tools_at_once: int = Field(default=8, ge=1, le=256, description="how many tool calls of an answer may run at once")
    calls_max: int = Field(default=32, ge=1, le=1024, description="how many tool calls an answer may have")
    tool_characters_max: int = Field(
        default=20_000, ge=100, le=10_000_000, description="how many characters of a tool's result the model sees"
    )

    @model_validator(mode="after")
    def _nested(self) -> "RolloutBudgets":
        if not self.tool_s <= self.turn_s <= self.episode_s:
            raise ValueError(
                f"tool_s is {self.tool_s:g}, turn_s {self.turn_s:g} and episode_s {self.episode_s:g}, but they "
                "must satisfy tool_s <= turn_s <= episode_s"
            )
        return self
