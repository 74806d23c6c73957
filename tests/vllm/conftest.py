"""Tests with vLLM itself, in the environment of `bombus install vllm`. Run `pytest tests/vllm`; `tests` skips them.

They start real servers of real models, which takes a minute each.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        Path(config.invocation_params.dir, word.split("::")[0]).resolve() for word in config.invocation_params.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True
