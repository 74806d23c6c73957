"""Numbers that environment variables say."""

import pytest

from bombus.environments.variables import number_of
from bombus.errors import Refused


@pytest.mark.parametrize(("variables", "number"), [({}, 8), ({"N": " "}, 8), ({"N": " 1 "}, 1), ({"N": "64"}, 64)])
def test_a_variable_that_is_not_set_or_blank_leaves_the_default(variables: dict[str, str], number: int) -> None:
    assert number_of(variables, "N", 8, 1, 64) == number


@pytest.mark.parametrize("text", ["0", "65", "eight", "-1", "1.5", "٨", "²", "9" * 5000])
def test_what_is_no_number_in_its_range_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=f"N is '{text[:40]}': it must be a number from 1 to 64"):
        number_of({"N": text}, "N", 8, 1, 64)
