"""Going on from checkpoints: bit for bit, with other optimizers, as other models, and by other programs."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bombus.errors import Refused
from bombus.operations import (
    AdapterSpec,
    Category,
    CheckpointKind,
    CheckpointLoaded,
    CheckpointSaved,
    CreateModel,
    EndModel,
    LoadWeights,
    ModelEnded,
    ModelReady,
    Operation,
    Reduction,
    SaveWeights,
)
from bombus.weights.adapters import read_adapter_config
from bombus.weights.checkpoints import MANIFEST
from bombus_trainer.operations.checkpoints import CheckpointFolder, CheckpointName, ModelFacts
from bombus_trainer.operations.executor import OperationExecutor
from tests.trainer.operations.small_models import (
    BASE,
    SPEC,
    created,
    datum,
    executor,
    failed,
    forward_backward,
    logprobs,
    optim_step,
    random_data,
    scored,
    stepped,
)

TRAINING, SAMPLER = CheckpointKind.TRAINING, CheckpointKind.SAMPLER


def train(made: OperationExecutor, model: str, *seeds: int) -> None:
    """Take a step for each seed."""
    for seed in seeds:
        scored(made, model, forward_backward(*random_data(seed, 4)))
        stepped(made, model, optim_step(weight_decay=0.1, grad_clip_norm=5.0))


def save(made: OperationExecutor, model: str, name: str, kind: CheckpointKind = TRAINING) -> CheckpointSaved:
    found = made.execute(model, SaveWeights(checkpoint=kind, name=name))
    assert isinstance(found, CheckpointSaved), found
    return found


def facts_of(root: Path, checkpoint: str) -> ModelFacts:
    return CheckpointFolder(root / "checkpoints").read(CheckpointName.read(checkpoint)).facts


def loaded(made: OperationExecutor, model: str, checkpoint: str, with_optimizer: bool = True) -> int:
    """Load a checkpoint, and return the step."""
    found = made.execute(model, LoadWeights(checkpoint=checkpoint, with_optimizer=with_optimizer))
    assert isinstance(found, CheckpointLoaded), found
    return found.step


@pytest.mark.parametrize("spec", [SPEC, None], ids=["adapter", "all weights"])
def test_going_on_from_a_checkpoint_gives_the_bits_of_a_run_without_a_break(
    base: Path, tmp_path: Path, spec: AdapterSpec | None
) -> None:
    unbroken = executor(base, tmp_path / "unbroken")
    created(unbroken, "a", spec)
    train(unbroken, "a", 0, 1, 2, 3)
    wanted = save(unbroken, "a", "end")

    first = executor(base, tmp_path / "broken")
    created(first, "a", spec)
    train(first, "a", 0, 1)
    save(first, "a", "half")
    train(first, "a", 9)  # lost when the process ends
    second = executor(base, tmp_path / "broken")
    again = CreateModel(base=BASE, checkpoint="a/training/half", with_optimizer=True)
    assert isinstance(second.execute("a", again), ModelReady)
    train(second, "a", 2, 3)
    found = save(second, "a", "end")
    assert found.address == wanted.address
    ends = [Path(each.folder) / "optimizer.safetensors" for each in (found, wanted)]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    assert second.models == {"a": 4}

    assert loaded(second, "a", "a/training/half") == 2  # and in the same process
    train(second, "a", 2, 3)
    assert save(second, "a", "end-again").address == wanted.address


def test_without_its_optimizer_a_checkpoint_begins_anew(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    train(made, "a", 0, 1)
    half = save(made, "a", "half")
    fresh = CreateModel(base=BASE, checkpoint="a/training/half")
    ready = made.execute("b", fresh)
    assert isinstance(ready, ModelReady)
    assert (ready.adapter, ready.parameters) == (SPEC, 4096)
    whole = made.execute("c", CreateModel(base=BASE, checkpoint="a/training/half", with_optimizer=True))
    assert isinstance(whole, ModelReady)
    assert ready.loaded != whole.loaded, "the optimizer is a part of what was loaded"
    made.drop("c")
    assert (loaded(made, "a", "a/training/half", with_optimizer=False), made.models) == (0, {"a": 0, "b": 0})
    assert save(made, "b", "begun").address == half.address
    for model in ("a", "b"):
        train(made, model, 2)
    anew = save(made, "a", "on").address
    assert save(made, "b", "on").address == anew
    loaded(made, "b", "a/training/half")
    train(made, "b", 2)
    assert (save(made, "b", "with").address == anew, made.models["b"]) == (False, 3)


def test_a_load_clears_the_gradient_and_a_failure_on_it(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    scored(made, "a", forward_backward(*random_data(0, 3)))
    saved = save(made, "a", "x")
    assert facts_of(tmp_path, "a/training/x").unstepped.operations == 1
    failed(made, "a", forward_backward(datum([99])))
    loaded(made, "a", "a/training/x")
    assert stepped(made, "a", optim_step()).grad_norm == 0.0
    assert save(made, "a", "y").address == saved.address


def test_peft_reads_a_sampler_checkpoint_and_computes_the_same(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a", AdapterSpec(rank=4, alpha=32.0, seed=3))
    train(made, "a", 0, 1, 2)
    folder = Path(save(made, "a", "snapshot", SAMPLER).folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        MANIFEST,
    ]
    assert read_adapter_config(folder).r == 4
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    one = datum([5, 6, 7, 8])
    found = logprobs(scored(made, "a", forward_backward(one, forward_only=True)))
    with torch.no_grad():
        wanted = torch.log_softmax(peft(torch.tensor([[5, 6, 7, 8]])).logits[0], -1)[torch.arange(4), [6, 7, 8, 0]]
    assert found == pytest.approx(wanted.tolist(), abs=1e-5)


def test_an_external_checkpoint_names_its_base_and_needs_nothing_else(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path, {"model": {"path": str(base)}})
    assert isinstance(made.execute("a", CreateModel(base=str(base), adapter=SPEC)), ModelReady)
    train(made, "a", 0, 1)
    found = logprobs(scored(made, "a", forward_backward(datum([5, 6, 7, 8]), forward_only=True)))
    folder = Path(save(made, "a", "out", CheckpointKind.EXTERNAL).folder)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        lines = torch.log_softmax(model(torch.tensor([[5, 6, 7, 8]])).logits[0], -1)
    assert found == pytest.approx(lines[torch.arange(4), [6, 7, 8, 0]].tolist(), abs=1e-5)
    assert loaded(made, "a", "a/external/out", with_optimizer=False) == 0


def test_transformers_reads_an_adapter_that_was_merged_for_others_and_computes_the_same(
    base: Path, tmp_path: Path
) -> None:
    made = executor(base, tmp_path)
    created(made, "m", SPEC)
    train(made, "m", 0, 1, 2)
    scoring = forward_backward(datum([5, 6, 7, 8]), forward_only=True)
    found = logprobs(scored(made, "m", scoring))
    saved = made.execute("m", SaveWeights(checkpoint=CheckpointKind.EXTERNAL, name="whole", merged=True))
    assert isinstance(saved, CheckpointSaved), saved
    model = AutoModelForCausalLM.from_pretrained(saved.folder, dtype=torch.float32)
    with torch.no_grad():
        lines = torch.log_softmax(model(torch.tensor([[5, 6, 7, 8]])).logits[0], -1)
    assert found == pytest.approx(lines[torch.arange(4), [6, 7, 8, 0]].tolist(), abs=1e-5)
    assert (Path(saved.folder) / "tokenizer.json").is_file()
    assert facts_of(tmp_path, "m/external/whole").adapter is None
    assert logprobs(scored(made, "m", scoring)) == found, "the model itself is as it was"
    refused = failed(made, "m", SaveWeights(checkpoint=SAMPLER, name="whole", merged=True))
    assert refused.category is Category.USER


def test_transformers_reads_a_model_of_all_weights(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "full", None)
    train(made, "full", 0, 1)
    found = logprobs(scored(made, "full", forward_backward(datum([5, 6, 7, 8]), forward_only=True)))
    for kind in (TRAINING, SAMPLER):
        folder = save(made, "full", "end", kind).folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            lines = torch.log_softmax(model(torch.tensor([[5, 6, 7, 8]])).logits[0], -1)
        assert found == pytest.approx(lines[torch.arange(4), [6, 7, 8, 0]].tolist(), abs=1e-5)
    assert (Path(folder) / "tokenizer.json").is_file()


def test_a_sampler_checkpoint_does_not_change_when_training_goes_on(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    train(made, "a", 0)
    saved = save(made, "a", "snapshot", SAMPLER)
    before = {path.name: path.read_bytes() for path in Path(saved.folder).iterdir()}
    train(made, "a", 1)
    assert (
        "there is a checkpoint a/sampler/snapshot already"
        in failed(made, "a", SaveWeights(checkpoint=SAMPLER, name="snapshot")).error
    )
    assert {path.name: path.read_bytes() for path in Path(saved.folder).iterdir()} == before


def test_what_the_caller_says_is_in_the_facts(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    kept = SaveWeights(checkpoint=TRAINING, name="x", ttl_s=60.0)
    first = made.execute("a", kept, "op-3")
    facts = facts_of(tmp_path, "a/training/x")
    assert (facts.operation, facts.base, facts.adapter) == ("op-3", BASE, SPEC)
    train(made, "a", 0)
    assert made.execute("a", kept, "op-3") == first
    assert "ttl_s is -1.0" in failed(made, "a", SaveWeights(checkpoint=TRAINING, name="y", ttl_s=-1.0)).error


def test_a_model_is_saved_before_it_ends_and_stays_where_that_fails(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    train(made, "a", 0)
    save(made, "a", "taken")
    assert "already" in failed(made, "a", EndModel(save_as="taken")).error
    assert made.models == {"a": 1}
    ended = made.execute("a", EndModel(save_as="last"))
    assert isinstance(ended, ModelEnded)
    assert ended.saved is not None
    assert ended.saved.name == "last"
    assert made.models == {}
    assert isinstance(made.execute("a", CreateModel(base=BASE, checkpoint="a/training/last")), ModelReady)


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (LoadWeights(checkpoint="a/training/none"), "there is no checkpoint a/training/none"),
        (LoadWeights(checkpoint="../training/x"), "cannot be the name of a model"),
        (LoadWeights(checkpoint="a/sampler/s", with_optimizer=True), "has no optimizer: load it without one"),
        (LoadWeights(checkpoint="b/training/t"), "holds an adapter of rank 2 with alpha 4, but this model"),
        (LoadWeights(checkpoint="c/training/t"), "belongs to another model: base_model.model.model.layers.0.mlp"),
        (SaveWeights(checkpoint=TRAINING, name="../x"), "'../x' cannot be the name of a checkpoint"),
    ],
)
def test_what_cannot_be_loaded_or_saved_changes_nothing(
    base: Path, tmp_path: Path, operation: Operation, why: str
) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    created(made, "b", AdapterSpec(rank=2, alpha=4.0))
    created(made, "c", AdapterSpec(rank=4, alpha=8.0, targets=("q_proj",)))
    for model in "bc":
        save(made, model, "t")
    train(made, "a", 0)
    before = save(made, "a", "s", SAMPLER).address
    refused = failed(made, "a", operation)
    assert (refused.category, why in refused.error) == (Category.USER, True), refused.error
    assert save(made, "a", "after", SAMPLER).address == before
    assert made.models["a"] == 1


def test_an_optimizer_of_another_model_is_refused_in_words(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    created(made, "c", AdapterSpec(rank=4, alpha=8.0, targets=("q_proj",)))
    train(made, "a", 0)
    save(made, "a", "t")
    refused = failed(made, "c", LoadWeights(checkpoint="a/training/t", with_optimizer=True))
    assert (refused.category, "load it without its optimizer" in refused.error) == (Category.USER, True), refused.error


def test_a_checkpoint_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    manifest = Path(save(made, "a", "x").folder) / MANIFEST
    manifest.write_text(manifest.read_text().replace('"base":"tiny-base"', '"base":"other"'))
    refused = failed(made, "b", CreateModel(base=BASE, checkpoint="a/training/x"))
    assert refused.error == "the checkpoint a/training/x belongs to a model on other, but here the base is tiny-base"


def test_a_damaged_checkpoint_is_the_servers_fault(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    file = Path(save(made, "a", "x").folder) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    refused = failed(made, "a", LoadWeights(checkpoint="a/training/x"))
    assert (refused.category, "is damaged" in refused.error) == (Category.SERVER, True)


def test_a_save_that_cannot_be_written_is_the_servers_fault_and_the_model_stays(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    train(made, "a", 0)
    (tmp_path / "checkpoints" / "a").write_text("a file where the model's folder has to be")
    for operation in (SaveWeights(checkpoint=TRAINING, name="x"), EndModel(save_as="x")):
        refused = failed(made, "a", operation)
        assert (refused.category, "a file could not be written" in refused.error) == (Category.SERVER, True)
    (tmp_path / "checkpoints" / "a").unlink()
    train(made, "a", 1)
    assert save(made, "a", "x").name == "x"


def test_models_whose_optimizers_wait_in_files_train_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    def addresses(root: str, bytes_max: int) -> list[str]:
        made = executor(base, tmp_path / root, optimizer_bytes_max=bytes_max)
        for model in "abc":
            created(made, model)
        for seed in range(3):
            for model in "abc":
                scored(made, model, forward_backward(*random_data(seed + ord(model), 3)))
            for model in "cab":
                stepped(made, model, optim_step())
        assert len(made.offloaded) == (2 if bytes_max == 0 else 0)
        return [save(made, model, "end").address for model in "abc"]

    assert addresses("little", 0) == addresses("much", 1 << 30)


def test_an_optimizer_whose_file_is_damaged_is_replaced_by_a_checkpoints(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path, optimizer_bytes_max=0)
    for model in "ab":
        created(made, model)
        train(made, model, 0)
    save(made, "a", "x")
    train(made, "b", 1)
    assert made.offloaded == ["a"]
    (file,) = (tmp_path / "scratch").iterdir()
    file.write_bytes(b"")
    scored(made, "a", forward_backward(*random_data(1, 3)))
    lost = failed(made, "a", optim_step())
    assert (lost.category, "the optimizer of a is lost" in lost.error) == (Category.SERVER, True)
    assert loaded(made, "a", "a/training/x") == 1
    train(made, "a", 1)
    assert load_file(Path(save(made, "a", "y").folder) / "optimizer.safetensors")


# ---- recovery checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, None], ids=["adapter", "all weights"])
def test_a_model_recovers_in_the_middle_of_a_step(base: Path, tmp_path: Path, spec: AdapterSpec | None) -> None:
    def begun(root: str) -> OperationExecutor:
        made = executor(base, tmp_path / root)
        created(made, "a", spec)
        train(made, "a", 0)
        scored(made, "a", forward_backward(*random_data(1, 4)))
        return made

    def ended(made: OperationExecutor) -> str:
        scored(made, "a", forward_backward(*random_data(2, 4)))
        step = stepped(made, "a", optim_step(Reduction.TOKEN_MEAN))
        return f"{step} {save(made, 'a', 'end').address}"

    wanted = ended(begun("unbroken"))
    first = begun("broken")
    checkpointed = first.save_for_recovery("a", "7")
    assert first.save_for_recovery("a", "7") == checkpointed
    second = executor(base, tmp_path / "broken")
    second.recover("a", "7", checkpointed.digest)
    assert ended(second) == wanted
    second.recover("a", "7", checkpointed.digest)  # in the place of the model that is there
    assert second.models == {"a": 1}


def test_a_failure_on_a_gradient_is_recovered_too(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    failed(made, "a", forward_backward(datum([99])))
    checkpointed = made.save_for_recovery("a", "1")
    again = executor(base, tmp_path)
    again.recover("a", "1", checkpointed.digest)
    assert "datum 0 has the token id 99" in failed(again, "a", optim_step()).error


def test_recovery_checkpoints_are_apart_from_what_callers_save(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    digests = [made.save_for_recovery("a", name).digest for name in ("1", "2", "3")]
    assert "there is no checkpoint a/training/3" in failed(made, "a", LoadWeights(checkpoint="a/training/3")).error
    with pytest.raises(Refused, match="there is no checkpoint a/training/4"):
        made.recover("a", "4", digests[0])
    assert made.models == {"a": 0}
    made.recover("a", "3", digests[2])


def test_a_checkpoint_that_was_removed_can_be_saved_again(base: Path, tmp_path: Path) -> None:
    made = executor(base, tmp_path)
    created(made, "a")
    save(made, "a", "x")
    made.remove_checkpoint("a/training/x")
    made.remove_checkpoint("a/training/x")
    with pytest.raises(Refused, match="there is no checkpoint"):
        facts_of(tmp_path, "a/training/x")
    save(made, "a", "x")
