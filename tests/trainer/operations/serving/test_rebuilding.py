"""What a trainer says of the models that it makes again, and what it does not try any more."""

import pytest

from bombus.hive.operations.state import ClientModel
from bombus_trainer.operations.serving.rebuilding import NoneSurvived, Rebuild


def model(rebuilding_by: int = 0, unsurvived: dict[int, tuple[int, ...]] | None = None) -> ClientModel:
    made = ClientModel(name="m", session="s", base="tiny", run=1, opened_ns=1, begun=1, numbers=9)
    made.rebuilding_by, made.unsurvived = rebuilding_by, unsurvived or {}
    return made


class Said:
    """An attempt of trainer 5, of which three may try each operation, and what it says."""

    def __init__(self, made: ClientModel) -> None:
        self.said: list[tuple[int, bool]] = []
        self.rebuild = Rebuild(made, 5, 3, self.say)

    async def say(self, number: int, over: bool) -> None:
        self.said.append((number, over))

    async def execute(self, *numbers: int) -> list[tuple[int, bool]]:
        for number in numbers:
            await self.rebuild.begins(number)
        await self.rebuild.over()
        return self.said


async def test_the_first_attempt_says_that_it_begins_and_that_it_is_through() -> None:
    assert await Said(model()).execute(3, 4, 5) == [(0, False), (0, True)]


async def test_of_a_model_that_needs_nothing_to_be_made_nothing_is_said() -> None:
    assert await Said(model()).execute() == []


async def test_after_a_trainer_that_has_not_lived_through_it_each_operation_is_said() -> None:
    assert await Said(model(rebuilding_by=4)).execute(3, 4) == [(3, False), (4, False), (0, True)]
    assert await Said(model(rebuilding_by=5)).execute(3, 4) == [(0, False), (0, True)], "it was this one"


async def test_two_trainers_that_have_ended_are_not_enough_and_this_one_does_not_count() -> None:
    assert await Said(model(4, {3: (2, 4)})).rebuild.rescued_from() == 0
    assert await Said(model(5, {3: (2, 4, 5)})).rebuild.rescued_from() == 0


async def test_what_three_trainers_have_not_survived_is_gone_round_by_what_was_saved_later() -> None:
    attempt = Said(model(4, {3: (2, 3, 4), 7: (1,)}))
    assert await attempt.rebuild.rescued_from() == 3
    assert attempt.said == [(3, False)], "this may be deadly too"
    assert "3 trainers ended while they rebuilt it, at operation 3, so" in str(attempt.rebuild.none_survived())


async def test_what_six_trainers_have_not_survived_is_left_alone() -> None:
    attempt = Said(model(7, {3: (1, 2, 3, 4, 6, 7)}))
    with pytest.raises(NoneSurvived, match="bombus resume"):
        await attempt.rebuild.rescued_from()
    assert attempt.said == []
