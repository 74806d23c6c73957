"""The model card: what the log knows of a version, and nothing of the export itself."""

import json
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from bombus.config.job import RunConfig, validated
from bombus.export.card import REWARDS_SHOWN, card, loading
from bombus.export.writing import ExportedFiles
from bombus.replay.archive import FileSource
from bombus.replay.logged_run import LoggedRun, LoggedStep, read_run
from tests.logs.facts import TINY

MODEL = ExportedFiles({"model.safetensors": "ab" * 32})
ADAPTER = ExportedFiles({"adapter_model.safetensors": "cd" * 32}, rank=20)


@pytest.fixture
async def golden() -> LoggedRun:
    with FileSource.open(TINY) as source:
        return await read_run(source, run=1)


def with_job(run: LoggedRun, job: RunConfig) -> LoggedRun:
    return msgspec.structs.replace(run, job=job)


def front_matter(text: str) -> dict[str, str]:
    lines = text.split("---\n")[1].splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith("#"))


def test_the_facts_are_those_of_the_steps_up_to_the_version(golden: LoggedRun) -> None:
    first, second = (card("main", golden, number, MODEL, "tiny") for number in (1, 2))
    assert "| trained on | 4 episodes in 2 groups |" in first
    assert "after 1 optimizer step." in first
    assert "| trained on | 8 episodes in 4 groups |" in second
    assert "after 2 optimizer steps." in second
    assert "| run started | 20" in second
    assert first.count(" UTC |\n") == 3, "the run, the version, and its step"
    assert "ab" * 32 in first
    assert golden.weights[1].sha256 in first
    assert golden.weights[2].sha256 not in first


def test_a_run_that_went_on_from_an_earlier_one_says_where_it_began(golden: LoggedRun) -> None:
    begun = "at the checkpoint of step 1 of run 1, with trainer.lr 1e-05 -> 2e-05"
    run = msgspec.structs.replace(golden, begun=begun, first=1, steps={2: golden.steps[2]})
    text = card("main", run, 2, MODEL, "tiny")
    assert f"| run begun | {begun} |" in text
    assert "| trained on | 4 episodes in 2 groups; steps 1 to 1 were made in earlier runs |" in text


def test_version_0_has_no_steps_and_no_rewards(golden: LoggedRun) -> None:
    text = card("main", golden, 0, MODEL, "tiny")
    assert "after 0 optimizer steps." in text
    assert "| trained on | 0 episodes in 0 groups |" in text
    assert "## Rewards" not in text


def test_of_many_steps_some_are_shown_evenly_with_the_first_and_the_last(golden: LoggedRun) -> None:
    batch = golden.steps[1].batch
    steps = {n: LoggedStep(msgspec.structs.replace(batch, step=n), n) for n in range(1, 301)}
    many = msgspec.structs.replace(golden, steps=steps, versions={300: golden.versions[1]})
    text = card("main", many, 300, MODEL, "tiny")
    table = text.partition("## Rewards")[2].partition("## Weights")[0]
    shown = [int(line.split("|")[1]) for line in table.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert f"{REWARDS_SHOWN} of 300 steps:" in table
    assert (shown[0], shown[-1], len(shown)) == (1, 300, REWARDS_SHOWN)
    assert {after - before for before, after in pairwise(shown)} <= {15, 16}


def test_steps_that_were_compacted_away_are_named(golden: LoggedRun) -> None:
    rest = msgspec.structs.replace(golden, steps={2: golden.steps[2]}, started_ns=0)
    text = card("main", rest, 2, MODEL, "tiny")
    assert "| trained on | 4 episodes in 2 groups; steps 1 to 1 were removed by compacting the log |" in text
    assert "run started" not in text


def job(**model: object) -> RunConfig:
    return validated({"model": model}, {})


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tiny", None),
        ("/models/mine", None),
    ],
)
def test_the_hub_is_told_only_names_that_it_knows(golden: LoggedRun, path: str, named: str | None) -> None:
    found = front_matter(card("main", with_job(golden, job(path=path)), 1, MODEL, path))
    assert found.get("base_model") == (None if named is None else json.dumps(named))
    assert found["library_name"] == "transformers"
    assert json.loads(found["tags"]) == ["bombus", "reinforcement-learning", "grpo"]


def test_a_long_setting_is_not_repeated(golden: LoggedRun) -> None:
    text = card("main", with_job(golden, job(path="m/" * 450)), 1, MODEL, "m")
    settings = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert settings["model"] == {"path": "(900 characters)"}


def test_an_adapter_is_loaded_on_its_base_with_a_rank_that_vllm_takes() -> None:
    lines = dict(loading(ADAPTER, "here", "base"))
    assert lines["peft"] == 'AutoPeftModelForCausalLM.from_pretrained("here")'
    assert lines["vLLM"] == "vllm serve base --enable-lora --max-lora-rank 32 --lora-modules trained=here"
    assert dict(loading(MODEL, "my models/a", "base"))["vLLM"] == "vllm serve 'my models/a'"


def test_what_merging_rounds_away_is_said(golden: LoggedRun) -> None:
    def texts() -> Iterator[str]:
        for share in (0.0, 0.42):
            yield card("main", golden, 1, ExportedFiles(MODEL.digests, share_lost=share), "tiny")

    none, much = texts()
    assert "Merging lost" not in none
    assert "Merging lost 42.0% of what the adapter adds to rounding" in much
