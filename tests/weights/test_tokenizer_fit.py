"""A tokenizer of another model is recognised from its files, and a model's own is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest

from bombus.errors import EngineFault
from bombus.weights.models import build_tiny, load_tokenizer_files, resolve_tokenizer
from bombus.weights.tokenizer_fit import check_fit, token_ids

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder)
    return folder


def changed(files: Files, name: str, **keys: Any) -> Files:
    return {**files, name: json.dumps({**json.loads(files[name]), **keys}).encode()}


def qwen_like(**config: Any) -> Files:
    """Files with the proportions of Qwen 2.5: 151,665 tokens in a vocabulary that is padded to 151,936."""
    added = {token: 151_643 + index for index, token in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))} | {
        f"<|extra_{index}|>": 151_646 + index for index in range(19)
    }
    described = {
        "model": {"type": "BPE", "vocab": {f"w{index}": index for index in range(151_643)}},
        "added_tokens": [{"id": index, "content": token, "special": True} for token, index in added.items()],
    }
    text = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": None}
    template = "{{ '<|im_start|>' + messages[0].content + '<|im_end|>' }}"
    config = {"vocab_size": 151_936, "eos_token_id": 151_645, "bos_token_id": 151_643, **config}
    trees = {
        "tokenizer.json": described,
        "tokenizer_config.json": {**text, "chat_template": template},
        "config.json": config,
        "generation_config.json": {"eos_token_id": [151_645, 151_643], "pad_token_id": 151_643},
    }
    return {name: json.dumps(tree).encode() for name, tree in trees.items()}


def misfit(files: Files) -> str:
    with pytest.raises(EngineFault) as caught:
        check_fit(files, "the-model", "the-tokenizer")
    why = str(caught.value)
    assert why.startswith("the tokenizer of 'the-tokenizer' does not fit the model 'the-model': ")
    return why


def test_the_models_own_tokenizer_fits(tiny: Path) -> None:
    check_fit(load_tokenizer_files(tiny), "tiny", "tiny")


def test_a_vocabulary_that_is_padded_fits() -> None:
    check_fit(qwen_like(), "qwen", "qwen")
    check_fit(qwen_like(vocab_size=152_064), "qwen", "qwen")


def test_a_token_beyond_the_models_vocabulary_is_named() -> None:
    assert "its token '<|extra_18|>' has the id 151664, but the model's ids end at 49151" in misfit(
        qwen_like(vocab_size=49_152)
    )


def test_a_vocabulary_far_above_the_tokenizers_is_another_models(tiny: Path) -> None:
    files = changed(load_tokenizer_files(tiny), "config.json", vocab_size=49_152)
    assert "it has 44 tokens, but the model has 49152" in misfit(files)


def test_an_end_of_sequence_that_is_an_ordinary_token_is_another_models() -> None:
    why = misfit(qwen_like(eos_token_id=2))
    assert "config.json has eos_token_id 2, which is 'w2' in the tokenizer, whose eos_token is '<|im_end|>'" in why


def test_an_end_of_sequence_that_is_another_special_token_is_the_models_own() -> None:
    check_fit(qwen_like(eos_token_id=151_643), "deepseek-like", "deepseek-like")


def test_a_padding_id_without_a_token_is_refused() -> None:
    why = misfit(changed(qwen_like(), "generation_config.json", pad_token_id=151_900))
    assert "generation_config.json has pad_token_id 151900, which is no token in the tokenizer" in why


def test_in_the_models_own_folder_only_the_end_of_sequence_has_to_agree() -> None:
    files = changed(qwen_like(bos_token_id=1), "tokenizer_config.json", bos_token="<|im_start|>")
    assert "config.json has bos_token_id 1, which is 'w1' in the tokenizer" in misfit(files)
    check_fit(files, "my-folder", "my-folder")
    with pytest.raises(EngineFault) as caught:
        check_fit(qwen_like(eos_token_id=2), "my-folder", "my-folder")
    why = str(caught.value)
    assert why.startswith("the tokenizer in 'my-folder' does not fit the model there: the model's config.json has eos_")
    assert why.endswith("; correct its files, or set model.tokenizer to another one")


def test_a_named_end_of_sequence_that_the_tokenizer_does_not_have_is_refused() -> None:
    assert "its eos_token '</s>' is not one of its tokens" in misfit(
        changed(qwen_like(), "tokenizer_config.json", eos_token="</s>")
    )


def test_ids_are_read_from_every_kind_of_vocabulary() -> None:
    added = [{"id": 7, "content": "<x>", "special": False}]
    assert token_ids({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": added}) == {
        "a": 0,
        "b": 1,
        "<x>": 7,
    }
    assert token_ids({"model": {"vocab": {"a": 3}}}) == {"a": 3}


def test_a_tokenizer_from_elsewhere_comes_with_the_models_own_configuration(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text("{}")
    files = load_tokenizer_files(tiny, resolve_tokenizer(str(tmp_path)))
    assert set(files) == {"tokenizer.json", "config.json", "generation_config.json"}
    assert files["config.json"] == (tiny / "config.json").read_bytes()
    with pytest.raises(EngineFault, match="there is no tokenizer at"):
        resolve_tokenizer(str(tmp_path / "nowhere"))
