"""docs/scaling.md has the figures of `python -m bench.scaling`, whose simulation finds what was measured."""

from itertools import chain
from pathlib import Path

from bench.scaling import (
    CORE_HOUR,
    GPU_HOUR,
    MEASURED,
    TOKENS_S,
    Load,
    costs,
    saturation,
    simulated,
    size,
    sizes,
    validation,
)

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"


def test_the_page_has_the_tables_of_the_command() -> None:
    page = PAGE.read_text()
    usual = Load(100_000)
    tables = (sizes(usual, TOKENS_S), saturation(usual), costs(usual, TOKENS_S, CORE_HOUR, GPU_HOUR), validation())
    assert [line for line in chain(*tables) if line not in page] == [], "copy them from: python -m bench.scaling"


def test_the_simulation_finds_the_cpu_and_the_median_of_what_was_measured_within_a_quarter() -> None:
    for load, measured in MEASURED.items():
        seen = simulated(load, cores=2)
        for name in ("p50_ms", "gateway", "coordinator", "nats"):
            assert 0.75 < getattr(seen, name) / getattr(measured, name) < 1.25, (load, name)


def test_twice_the_episodes_take_at_least_as_much_of_everything() -> None:
    for episodes in (100, 5_000, 250_000):
        one, two = (size(Load(each), TOKENS_S) for each in (episodes, 2 * episodes))
        assert two.hives >= one.hives
        assert two.hives * two.gateways >= one.hives * one.gateways
        assert two.replicas >= one.replicas
        assert two.stored_gb_h > one.stored_gb_h


def test_a_hive_with_too_few_gateways_adds_more_to_an_answer() -> None:
    load = Load(4_000, turns=4, tool_s=2.0, answer_s=2.0)
    assert simulated(load, gateways=8).p99_ms < simulated(load, gateways=4).p99_ms
