"""`bombus export` of what a real trainer has published: other tools load it, and compute what the trainer computes."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bombus.bus import Bus
from bombus.cli import main
from bombus.commands.export import CopyReport
from bombus.export.finding import VersionFiles
from bombus.export.folder import drafted
from bombus.export.writing import write_whole
from bombus.hive.events import Weights, WeightsReady
from bombus.hive.state import Phase
from bombus.replay.running import BadUsage
from bombus.weights.adapters import ADAPTER_FILE, ADAPTER_FORMAT
from bombus.weights.deltas import DELTA_FORMAT, FULL_FILE, FULL_FORMAT, file_sha256
from bombus.weights.models import resolve_model
from tests.conftest import SMALL_STREAMS
from tests.system.test_weights_end_to_end import trained_model
from tests.trainer.trainer_hive import staged

STEPS = 3  # the newest two versions are kept, and what they are made of
PROMPT = [1, 2, 3, 4, 5]
Capture = pytest.CaptureFixture[str]


@dataclass
class Trained:
    """A run of a trainer that has ended. Its log is on the bus; `model` is its newest version, from the checkpoint."""

    url: str
    hive: str
    folder: Path
    weights: list[Weights]
    model: PreTrainedModel
    job_digest: str

    @property
    def newest(self) -> Weights:
        return self.weights[-1]

    def export(self, out: Path, *words: str) -> int:
        return main(["export", "--nats", self.url, "--hive", self.hive, "--out", str(out), *words])

    def exported(self, out: Path, *words: str) -> Path:
        assert self.export(out, *words) == 0
        return out


async def train(trained_in: tuple[str, str, Path], lora: bool, dtype: str, **options: object) -> Trained:
    url, hive, folder = trained_in
    async with await Bus.connect(url, hive, name="test") as bus:
        await bus.ensure_streams(SMALL_STREAMS)
        async with staged(bus, folder) as stage:
            (folder / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
            job = stage.job(lr=1e-2 if lora else 1e-4, lora_rank=4 if lora else 0)
            job = job.model_copy(update={"model": job.model.model_copy(update={"dtype": dtype})})
            stage.train(options=stage.options.model_copy(update=options))
            await stage.start(job)
            for version in range(STEPS + 1):
                await stage.until(Phase.ROLLING, version)
                if version < STEPS:
                    await stage.play_batch(shift=version)
            model = await asyncio.to_thread(trained_model, stage, job)
            made = [event.weights for event in stage.events if isinstance(event, WeightsReady)]
            return Trained(url, hive, folder, made, model, job.digest)


def trained_as(
    nats_url: str, factory: pytest.TempPathFactory, name: str, lora: bool, dtype: str, **options: object
) -> Trained:
    place = (nats_url, f"export-{name}", factory.mktemp(name))
    return asyncio.run(train(place, lora, dtype, **options))


@pytest.fixture(scope="module")
def whole(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_as(nats_url, tmp_path_factory, "whole", False, "float32")


@pytest.fixture(scope="module", params=["folder", "objects"])
def deltas(nats_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    options = {"weights_by": request.param, "weights_full_every": 8}
    return trained_as(nats_url, tmp_path_factory, f"deltas-{request.param}", False, "bfloat16", **options)


@pytest.fixture(scope="module", params=["folder", "objects"])
def adapters(nats_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trained:
    name = f"adapters-{request.param}"
    return trained_as(nats_url, tmp_path_factory, name, True, "float32", weights_by=request.param)


@pytest.fixture(scope="module")
def half_adapters(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_as(nats_url, tmp_path_factory, "half-adapters", True, "bfloat16")


def worst(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Return the largest difference between the logprobs that two models give after each token of the prompt."""
    with torch.no_grad():
        one, two = (torch.log_softmax(each(torch.tensor([PROMPT])).logits.float(), -1) for each in (model, other))
    return float((one - two).abs().max())


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Return a folder to make; nothing else may be left beside it."""
    (tmp_path / "place").mkdir()
    yield tmp_path / "place" / "kept"
    assert {each.name for each in (tmp_path / "place").iterdir()} <= {"kept"}


# ---- what other tools load ----------------------------------------------------------------------------------------


def test_transformers_loads_a_full_copy_and_computes_what_the_trainer_does(whole: Trained, out: Path) -> None:
    assert whole.newest.format == FULL_FORMAT
    whole.exported(out)
    assert worst(AutoModelForCausalLM.from_pretrained(out), whole.model) < 1e-6
    assert file_sha256(out / FULL_FILE) == whole.newest.sha256
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("w7 w3", add_special_tokens=False).input_ids
    assert tokenizer.chat_template == "{{ messages }}"


def test_a_version_that_was_published_as_a_delta_is_put_together(deltas: Trained, out: Path) -> None:
    assert deltas.newest.format == DELTA_FORMAT
    deltas.exported(out)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert worst(loaded.float(), deltas.model) < 1e-6
    assert file_sha256(out / FULL_FILE) == deltas.newest.sha256


def test_peft_loads_an_adapter_on_the_model_that_was_trained(adapters: Trained, out: Path) -> None:
    assert adapters.newest.format == ADAPTER_FORMAT
    adapters.exported(out)
    assert worst(AutoPeftModelForCausalLM.from_pretrained(out), adapters.model) < 1e-5
    base = AutoModelForCausalLM.from_pretrained(adapters.folder / "model")
    assert worst(base, adapters.model) > 1e-2, "the steps have changed something"
    assert file_sha256(out / ADAPTER_FILE) == adapters.newest.sha256
    assert not (out / "config.json").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template == "{{ messages }}"


def test_an_exported_adapter_is_the_model_of_another_job(adapters: Trained, out: Path, tmp_path: Path) -> None:
    adapters.exported(out)
    folder = resolve_model(str(out), cache=tmp_path / "cache", dtype="float32")
    assert worst(AutoModelForCausalLM.from_pretrained(folder), adapters.model) < 1e-5
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages }}"


def test_an_adapter_is_merged_into_its_model_when_that_is_asked_for(adapters: Trained, out: Path) -> None:
    adapters.exported(out, "--merged")
    assert worst(AutoModelForCausalLM.from_pretrained(out), adapters.model) < 1e-5
    assert not (out / ADAPTER_FILE).exists()


def test_merging_into_bfloat16_says_what_it_rounds_away_and_float32_keeps_it(
    half_adapters: Trained, tmp_path: Path, capsys: Capture
) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(half_adapters.exported(tmp_path / "rounded", "--merged"))
    said = capsys.readouterr().out
    assert "of what the adapter adds: --float32 keeps all of it" in said
    exact_in = half_adapters.exported(tmp_path / "exact", "--merged", "--float32")
    assert "rounds away" not in capsys.readouterr().out
    exact = AutoModelForCausalLM.from_pretrained(exact_in)
    served = half_adapters.newest.adapter_of
    assert served is not None
    base = AutoModelForCausalLM.from_pretrained(served.where, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, half_adapters.exported(tmp_path / "adapter"))
    assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert worst(exact, peft) < 1e-5 < worst(rounded.float(), peft)


# ---- which version, from where ------------------------------------------------------------------------------------


def test_an_older_version_is_exported_by_its_number(whole: Trained, out: Path) -> None:
    whole.exported(out, str(STEPS - 1))
    assert file_sha256(out / FULL_FILE) == whole.weights[-2].sha256


@pytest.mark.parametrize("version", [0, 99])
def test_a_version_that_is_not_there_is_refused_with_those_that_are(
    whole: Trained, out: Path, capsys: Capture, version: int
) -> None:
    assert whole.export(out, str(version)) == 1
    said = capsys.readouterr().err
    why = {0: "is no longer at", 99: "there is no version 99 of engine main, run 1"}[version]
    assert why in said
    assert f"available: {STEPS - 1}, {STEPS}" in said


def test_an_engine_or_a_run_that_is_not_there_is_refused_with_those_that_are(
    whole: Trained, out: Path, capsys: Capture
) -> None:
    assert whole.export(out, "--engine", "other") == 1
    assert "has no engine other, only main" in capsys.readouterr().err
    assert whole.export(out, "--run", "7") == 1
    assert "has no run 7 of engine main, only 1" in capsys.readouterr().err


def test_only_an_adapter_can_be_merged_into_float32(whole: Trained, out: Path, capsys: Capture) -> None:
    assert whole.export(out, "--float32") == 2
    assert "--float32 requires --merged" in capsys.readouterr().err
    assert whole.export(out, "--merged", "--float32") == 2
    assert f"version {STEPS} was published as a whole model" in capsys.readouterr().err
    whole.exported(out, "--merged")
    assert file_sha256(out / FULL_FILE) == whole.newest.sha256


def test_weights_that_are_not_those_of_the_log_are_refused(whole: Trained, out: Path, capsys: Capture) -> None:
    file = Path(whole.newest.where) / FULL_FILE
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        assert whole.export(out) == 1
    finally:
        file.write_bytes(content)
    assert "the log says" in capsys.readouterr().err
    assert not out.exists()


# ---- the folder ---------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_empty_is_left_alone_and_force_replaces_only_an_export(
    whole: Trained, out: Path, capsys: Capture
) -> None:
    out.mkdir()
    whole.exported(out)
    assert whole.export(out) == 2
    assert "is not empty" in capsys.readouterr().err
    (out / "note").touch()
    whole.exported(out, "--force", str(STEPS - 1))
    assert file_sha256(out / FULL_FILE) == whole.weights[-2].sha256
    assert not (out / "note").exists()
    (out / "README.md").write_text("mine")
    assert whole.export(out, "--force") == 2
    assert "is not an earlier export" in capsys.readouterr().err
    assert whole.export(out / "deep" / "er") == 2
    assert "there is no folder" in capsys.readouterr().err


def test_an_export_that_is_interrupted_leaves_nothing(whole: Trained, out: Path) -> None:
    files = VersionFiles(whole.newest, {}, Path(whole.newest.where))

    def interrupt(done: int, total: int) -> None:
        assert 0 < done < total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), drafted(out) as draft:
        write_whole(files, draft, interrupt)
    assert list(out.parent.iterdir()) == []


def test_what_appears_in_the_folder_meanwhile_is_not_replaced(out: Path) -> None:
    def overtaken() -> None:
        with drafted(out) as draft:
            (draft / FULL_FILE).touch()
            out.mkdir()
            (out / "somebody's").touch()

    with pytest.raises(BadUsage, match="is not empty"):
        overtaken()
    assert [file.name for file in out.iterdir()] == ["somebody's"]


def test_a_copy_that_takes_long_says_how_far_it_is(capsys: Capture) -> None:
    progress = CopyReport(every_s=0.0)
    for done in (1, 2, 3):
        progress(done * 10**9, 3 * 10**9)
    assert capsys.readouterr().err.splitlines() == ["2.0 GB of 3.0 GB", "3.0 GB of 3.0 GB"]


def test_the_same_version_gives_the_same_bytes(adapters: Trained, tmp_path: Path) -> None:
    for form in ((), ("--merged",)):
        one, two = (files_in(adapters.exported(tmp_path / f"{name}{len(form)}", *form)) for name in "ab")
        assert one == two


# ---- the card -----------------------------------------------------------------------------------------------------


def test_the_card_says_where_the_version_came_from(whole: Trained, out: Path, capsys: Capture) -> None:
    whole.exported(out)
    printed = capsys.readouterr().out
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in printed
    assert f"vllm serve {out}" in printed
    text = (out / "README.md").read_text()
    assert text.startswith("---\n# Written by `bombus export`.\nlibrary_name: transformers\n")
    for fact in (
        f"Policy version {STEPS} of run 1, engine main, hive {whole.hive}",
        f"`{whole.folder / 'model'}` after {STEPS} optimizer steps",
        "| learning rate | 0.0001, constant |",
        "| batch | 2 groups of 2 episodes (rollout_until_finish_enough_tasks) |",
        "| trained on | 12 episodes in 6 groups |",
        f"| job | `{whole.job_digest}` |",
        f"| `{FULL_FILE}` | `{whole.newest.sha256}` |",
    ):
        assert fact in text
    rewards = [line.split(" | ") for line in text.splitlines() if line.endswith("UTC |") and " | 0.5 | " in line]
    assert [row[0].strip("| ") for row in rewards] == ["1", "2", "3"]
    assert {tuple(row[1:5]) for row in rewards} == {("4", "0.5", "0", "1")}
    settings = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert settings["collection"] == {"batch_size": 2}
    assert settings["trainer"]["lr"] == 1e-4


def test_the_card_of_an_adapter_is_for_peft_and_names_the_model_below_it(adapters: Trained, out: Path) -> None:
    adapters.exported(out)
    text = (out / "README.md").read_text()
    assert "library_name: peft" in text
    assert '"lora"' in text
    base = adapters.newest.adapter_of
    assert base is not None
    assert base.sha256 in text
    assert adapters.newest.sha256 in text
    assert f"vllm serve {adapters.folder / 'model'} --enable-lora --max-lora-rank 8" in text
    described = json.loads((out / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(adapters.folder / "model")
