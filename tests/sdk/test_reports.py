"""What is reported beside a reward: what the log cannot have is converted or left out, and costs no episode."""

import dataclasses
import datetime
import enum
import json
import math
import uuid
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pydantic import BaseModel

from bombus.hive.episodes import METADATA_BYTES_MAX
from bombus.hive.inbox import DEPTH_MAX, End, EpisodeResult, decode_message, encode_message
from bombus.sdk.reports import METRICS_MAX, AuxiliaryReport, read_report
from bombus.sdk.types import WorkflowOutput


class Colour(enum.Enum):
    RED = "red"


class Model(BaseModel):
    score: float
    extra: Any = None


@dataclasses.dataclass
class Point:
    x: Any


class Struct(msgspec.Struct):
    y: Any


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def tolist(self) -> object:
        raise RuntimeError("no numbers")


class Endless:
    def tolist(self) -> object:
        return self


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

CONVERTED = [
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.array([[1, 2]]), [[1, 2]]),
    (np.array(1.5), 1.5),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor([1, 2]), [1, 2]),
    (Decimal("0.5"), 0.5),
    (Fraction(1, 2), 0.5),
    (math.nan, None),
    (1 << 70, str(1 << 70)),
    ("\ud800", "?"),
    (b"a\xff", "a\\xff"),
    ((1, 2), [1, 2]),
    (frozenset([1]), [1]),
    ({1: {2.5: np.float32(1)}}, {"1": {"2.5": 1.0}}),
    (Colour.RED, "red"),
    (Model(score=1.0, extra=np.float32(2)), {"score": 1.0, "extra": 2.0}),
    (Point(np.float32(1)), {"x": 1.0}),
    (Struct(np.float32(1)), {"y": 1.0}),
    (Path("/a/b"), "/a/b"),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (uuid.UUID(int=0), "00000000-0000-0000-0000-000000000000"),
    (ValueError("x"), "ValueError('x')"),
]


def stored(report: AuxiliaryReport) -> AuxiliaryReport:
    """Check that every reader of the log can decode a report, and that it is JSON."""
    result = EpisodeResult(episode="e", task="t", metadata=report.metadata, log_metrics=report.log_metrics)
    message = decode_message(encode_message(End(id="1", engine="main", client="c", results=(result,))))
    assert isinstance(message, End)
    json.dumps(message.results[0].metadata, allow_nan=False)
    assert message.results[0].metadata == report.metadata
    return report


@pytest.mark.parametrize(("given", "kept"), CONVERTED, ids=lambda value: type(value).__name__)
def test_what_people_put_into_metadata_is_converted(given: object, kept: object) -> None:
    assert stored(read_report({"a": given, "b": 1}, None, None)).metadata == {"a": kept, "b": 1}


NUMBERS = [10**5000, Fraction(10**400), Decimal("sNaN")]  # that Python does not write


@pytest.mark.parametrize(
    "given",
    [object(), Hostile(), Endless(), lambda: 1, int, iter([1]), np.zeros(1 << 20), *NUMBERS],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_converted_is_left_out_alone(given: object) -> None:
    assert stored(read_report({"a": given, "b": [given, 1]}, {"c": given, "d": 1}, given)) == AuxiliaryReport(
        metadata={"b": [None, 1]}, log_metrics={"d": 1.0}, is_success=None
    )


def test_each_place_that_is_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        read_report({"said_once": object()}, {"format_said_once": None}, None)
    assert caplog.text.count("metadata.said_once is left out") == 1
    assert caplog.text.count("log_metrics.format_said_once is left out") == 1
    assert "None is not a finite number" in caplog.text


def test_metrics_are_numbers_and_means_of_numbers() -> None:
    given = {
        "none": None,
        "text": "0.5",
        "bool": np.bool_(True),
        "float32": np.float32(0.5),
        "array": np.array([1.0, 2.0]),
        "list": [1, 2.0],
        "empty": [],
        "nan": math.nan,
        "one infinite": [1.0, math.inf],
        "nested": {"a": 1},
        "n" * 257: 1,
        7: 7,
    }
    assert read_report(None, given, None).log_metrics == {
        "bool": 1.0,
        "float32": 0.5,
        "array": 1.5,
        "list": 1.5,
        "7": 7.0,
    }
    assert len(read_report(None, {str(number): number for number in range(2000)}, None).log_metrics) == METRICS_MAX


@pytest.mark.parametrize(
    ("given", "verdict"), [(None, None), (True, True), (np.bool_(False), False), (1, True), (0.0, False), ("yes", None)]
)
def test_a_success_is_true_or_false_or_not_said(given: object, verdict: bool | None) -> None:
    assert read_report(None, None, given).is_success is verdict


@pytest.mark.parametrize("given", [None, [], "text", 7, object()])
def test_what_is_no_mapping_is_left_out_as_a_whole(given: object) -> None:
    assert read_report(given, given, None) == AuxiliaryReport(metadata={}, log_metrics={}, is_success=None)


def test_a_model_in_place_of_a_mapping_is_its_fields() -> None:
    assert read_report(Model(score=1.0), Model(score=2.0), None).metadata == {"score": 1.0, "extra": None}


def test_the_largest_entries_are_left_out_where_all_are_too_much() -> None:
    given = {"large": "x" * 60_000, "small": 1, "larger": "x" * 61_000, "whole": [[0] * 1000] * 2000}
    report = stored(read_report(given, {f"{number}" * 40: 1.0 for number in range(20)}, None))
    assert [*report.metadata] == ["large", "small"]
    assert len(report.log_metrics) == 20
    many = stored(read_report(None, {"m" * 250 + str(number): 1.0 for number in range(1000)}, None))
    assert len(msgspec.msgpack.encode((many.metadata, many.log_metrics))) <= METADATA_BYTES_MAX


def test_what_is_nested_too_deep_is_cut_there() -> None:
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    kept = stored(read_report({"deep": deep, "cycle": CYCLE}, None, None)).metadata["deep"]
    for _ in range(DEPTH_MAX - 2):
        (kept,) = kept
    assert kept == [None]


def test_an_outcome_takes_whatever_an_agent_puts_beside_its_reward() -> None:
    output = WorkflowOutput(
        reward=1.0,
        is_success=np.bool_(True),  # type: ignore[arg-type]
        metadata={"score": np.float32(0.5)},
        log_metrics={"format": None},  # type: ignore[dict-item]
    )
    assert output.reward == 1.0
