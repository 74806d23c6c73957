"""A small Llama with a token for each character of ASCII: the renderers of recipes write more than `tiny` knows."""

import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = sorted(set(string.printable) - set("\x0b\x0c\r\t"))
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def write_alphabet_model(folder: Path) -> None:
    """Write a model of two layers, with weights from a fixed seed, and its tokenizer."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[EOS],
        bos_token_id=None,
        initializer_range=0.1,  # with less, the frozen output layer could not prefer one character by far
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    letters = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), "isolated")
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token=PAD,
        eos_token=EOS,
        unk_token="?",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
