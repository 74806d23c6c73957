"""docs/harnesses.md has a row for each harness of the catalogue, with the version that is pinned."""

from tests.harnesses.catalogue import HARNESSES
from tests.harnesses.install import NODE, SCHEMATHESIS, environments, version_of
from tests.harnesses.table import PAGE, listed


def test_the_page_has_each_harness_with_its_pinned_version() -> None:
    wanted = {harness.id: version_of(harness.environment, harness.package) for harness in HARNESSES}
    assert listed(PAGE.read_text()) == wanted, "run: make test-harnesses"


def test_every_environment_has_a_harness() -> None:
    assert {harness.environment for harness in HARNESSES} | {SCHEMATHESIS} == set(environments())
    assert NODE in environments()
