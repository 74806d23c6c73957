"""The ways in which an episode can fail: one closed vocabulary for all reporters, the log and the status."""

from enum import StrEnum

import msgspec


class FailureKind(StrEnum):
    """The kind of failure of an episode. An episode that used up a budget may still end with a reward; an episode that
    failed in any other way may not."""

    MODEL = "model"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    GRADER = "grader"
    TIME = "time"
    TOKENS = "tokens"
    TURNS = "turns"
    CLIENT = "client"
    HIVE = "hive"

    @property
    def is_trained(self) -> bool:
        """Whether an episode that failed in this way may end with a reward, and be trained on."""
        return FAILURES[self].is_trained

    @property
    def is_infra(self) -> bool:
        """Whether the failure is the fault of neither the model nor the client's own program."""
        return not self.is_trained and self is not FailureKind.CLIENT


class FailureRule(msgspec.Struct, frozen=True):
    meaning: str
    is_trained: bool = False


FAILURES = {
    FailureKind.MODEL: FailureRule("the model's server gave no answer, or refused a call"),
    FailureKind.TOOL: FailureRule("a tool hung, or could not run; any other error of a tool is shown to the model"),
    FailureKind.ENVIRONMENT: FailureRule("the environment could not be made or reset, or was lost"),
    FailureKind.SANDBOX: FailureRule("the sandbox, the workspace or the backend of the environment failed"),
    FailureKind.GRADER: FailureRule("a reward raised an error, took too long, or gave no number"),
    FailureKind.TIME: FailureRule("the time of the episode was used up", is_trained=True),
    FailureKind.TOKENS: FailureRule("the tokens of the episode were used up, or an answer was cut", is_trained=True),
    FailureKind.TURNS: FailureRule("the turns of the episode were used up", is_trained=True),
    FailureKind.CLIENT: FailureRule("the client's own program raised an error, was stopped, or was silent"),
    FailureKind.HIVE: FailureRule("the hive could not be reached, was stopped, or took the episode back"),
}
