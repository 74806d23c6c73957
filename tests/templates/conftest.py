"""Tests over chat templates that others made, in an environment of their own (`make test-templates`)."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        Path(config.invocation_params.dir, word.split("::")[0]).resolve() for word in config.invocation_params.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from tests.templates.battery import TALLY

    terminalreporter.write_line(str(TALLY))
