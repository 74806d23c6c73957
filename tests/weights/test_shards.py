"""Models in one safetensors file or several: other tools read them, and each file stays within its limit."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bombus.weights.deltas import FULL_FILE, TensorFile, patched
from bombus.weights.shards import INDEX_FILE, TensorHead, shards_of, write_model
from tests.small_models import small_llama
from tests.weights.delta_versions import write_full


def heads_of(source: TensorFile) -> list[TensorHead]:
    return [TensorHead(name, source.dtype(name), source.shape(name)) for name in source.names]


def head(name: str, count: int) -> TensorHead:
    return TensorHead(name, "BF16", (count,))


def test_tensors_keep_their_order_and_fill_each_file_up_to_the_limit() -> None:
    heads = [head("a", 3), head("b", 2), head("c", 1), head("d", 9), head("e", 1)]
    names = [[each.name for each in shard] for shard in shards_of(heads, bytes_max=10)]
    assert names == [["a", "b"], ["c"], ["d"], ["e"]], "d alone is larger than the limit"
    assert shards_of(heads, bytes_max=100) == [heads]


def test_a_model_that_fits_into_one_file_is_written_with_the_bytes_that_its_trainer_wrote(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5).to(torch.bfloat16), "a": torch.randn(7), "empty": torch.zeros(0, 2)}
    written = write_full(tmp_path / "trainers.safetensors", tensors)
    with TensorFile(tmp_path / "trainers.safetensors") as source:
        digests = write_model(tmp_path, heads_of(source), patched(source, ()))
    assert digests == {FULL_FILE: written.sha256}
    assert (tmp_path / FULL_FILE).read_bytes() == (tmp_path / "trainers.safetensors").read_bytes()


def test_transformers_loads_a_model_in_several_files(tmp_path: Path) -> None:
    model = small_llama()
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "sharded").mkdir()
    model.config.save_pretrained(tmp_path / "sharded")
    with TensorFile(tmp_path / "whole" / FULL_FILE) as source:
        digests = write_model(tmp_path / "sharded", heads_of(source), patched(source, ()), bytes_max=20_000)
    assert len(digests) > 2
    for number, (name, digest) in enumerate(digests.items(), 1):
        file = tmp_path / "sharded" / name
        assert name == f"model-{number:05d}-of-{len(digests):05d}.safetensors"
        assert sha256(file.read_bytes()).hexdigest() == digest
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= 20_000
    index = json.loads((tmp_path / "sharded" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_tensors_other_than_those_announced_are_a_mistake(tmp_path: Path) -> None:
    write_full(tmp_path / "source", {"a": torch.zeros(2), "b": torch.zeros(3)})
    with TensorFile(tmp_path / "source") as source:
        heads = heads_of(source)
        with pytest.raises(ValueError, match="more tensors"):
            write_model(tmp_path, heads[:1], patched(source, ()))
        with pytest.raises(ValueError, match="is b of 12 bytes, not a of"):
            write_model(tmp_path, heads[::-1], patched(source, ()))
