"""Functions by their paths: what a hook file imports of slime that is not here is said by its name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bombus.errors import Refused
from bombus.slime.functions import load_function, make_slime_importable
from bombus.slime.types import SlimeSample

WRAPPED = """
try:
    from slime.utils.processing_utils import build_processor_kwargs
except ImportError as error:
    raise ImportError("a helper is not installed") from error
"""


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    load_function.cache_clear()
    assert make_slime_importable()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime" or name.startswith("hook")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("generate", "names no function"),
        ("absent_module.generate", r"No module named 'absent_module'\. Write package\.module\.function"),
        ("json.absent", "json has no 'absent'"),
        ("absent.py:generate", "is not a file"),
        ("slime.agent.adapters.OpenAIAdapter", "imports slime.agent, which bombus lacks: its agents work in E2B"),
    ],
)
def test_a_path_of_no_function_is_refused(path: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        load_function(path)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("from slime.agent.harness import CodexHarness", "imports slime.agent, which bombus lacks: its agents work"),
        (
            WRAPPED,
            "imports build_processor_kwargs of slime.utils.processing_utils, which bombus lacks: it is for images",
        ),
        (
            WRAPPED.replace(" from error", ""),
            "imports build_processor_kwargs of slime.utils.processing_utils, which bombus lacks: it is for images",
        ),
        (
            "from slime.rollout.rm_hub import f1_score",
            "imports f1_score of slime.rollout.rm_hub, .*: it is one of slime's own rewards",
        ),
        (
            "import slime.rollout.rm_hub.math_utils",
            "imports slime.rollout.rm_hub.math_utils, .* put a copy of its file",
        ),
        ("from slime.backends.megatron_utils import cp_utils", "slime.backends, which bombus lacks: it is a part of"),
        ("import an_absent_package", "No module named 'an_absent_package'; it imports that module: install it$"),
        ("raise KeyError('HOME_OF_IT')", "cannot be imported: KeyError: 'HOME_OF_IT'$"),
        ("def generate(:", "cannot be imported: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_with_what_it_lacks(code: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(f"{code}\n\n\ndef generate(args, sample, params): ...\n")
    with pytest.raises(Refused, match=why):
        load_function(f"{tmp_path}/hook.py:generate")


def test_a_checkout_of_slime_beside_a_hook_file_is_not_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slime/utils").mkdir(parents=True)
    for name in ("slime/__init__.py", "slime/utils/__init__.py", "slime/utils/types.py"):
        (tmp_path / name).write_text("import ray\n")
    (tmp_path / "hook.py").write_text("from slime.utils.types import Sample\n")
    assert load_function(f"{tmp_path}/hook.py:Sample") is SlimeSample


def test_what_slime_scores_boxed_answers_with_is_there(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text("from slime.rollout.rm_hub.math_dapo_utils import compute_score\n")
    score = load_function(f"{tmp_path}/hook.py:compute_score")
    assert score(r"so \boxed{7}", "7", strict_box_verify=True) == {"score": 1.0, "acc": True, "pred": "7"}


def test_files_of_one_name_are_modules_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder, score in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hook_of_two.py").write_text(f"def score(): return {score}\ndef other(): return score()")
    one, two = (f"{tmp_path}/{folder}/hook_of_two.py" for folder in "ab")
    assert [load_function(f"{file}:score")() for file in (one, two)] == [1, 2]
    assert load_function(f"{two}:other").__globals__ is load_function(f"{two}:score").__globals__, "a file is read once"
    assert load_function(f"{one}:other")() == 1
    (tmp_path / "types.py").write_text("def score(): return 3")  # a module of Python's has this name
    assert load_function(f"{tmp_path}/types.py:score")() == 3
    (tmp_path / "b/hook_that_raises.py").write_text("raise KeyError(5)")
    for _ in range(2):
        with pytest.raises(Refused, match=r"hook_that_raises\.py:score cannot be imported: KeyError: 5"):
            load_function(f"{tmp_path}/b/hook_that_raises.py:score")
