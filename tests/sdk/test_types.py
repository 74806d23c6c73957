"""The types that a program makes: tasks and outcomes."""

import pytest
from pydantic import ValidationError

from bombus import Task, WorkflowOutput


def test_a_field_that_a_task_or_an_outcome_does_not_have_is_refused_and_not_lost() -> None:
    with pytest.raises(ValidationError, match=r"prompt\s+Extra inputs are not permitted"):
        Task(prompt="2 plus 2 =")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"success\s+Extra inputs are not permitted"):
        WorkflowOutput(reward=1.0, success=True)  # type: ignore[call-arg]
    assert Task(main_query="2 plus 2 =", metadata={"prompt": "?"}).metadata == {"prompt": "?"}
