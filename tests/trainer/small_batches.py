"""Helpers that the trainer's tests share: call records, and a model of 30,000 parameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bombus.config.job import validated
from bombus.hive.records import (
    CallRecord,
    CallRef,
    CallStatus,
    Choice,
    SamplingParams,
    digest,
    encode_record,
    pack_logprobs,
    pack_tokens,
    spans_of,
)
from bombus_trainer.data.batch import EpisodeCalls
from bombus_trainer.data.packing import Terms, TrainingItem
from bombus_trainer.settings import TrainerSettings
from tests.small_models import small_llama

VOCAB = 64


def call(
    name: str,
    tail: Sequence[int],
    *sampled: Sequence[int],
    parent: CallRecord | None = None,
    parent_choice: int = 0,
    prompt_tokens: int | None = None,
    logprob: float = -1.0,
    temperature: float = 1.0,
    status: CallStatus = CallStatus.COMPLETE,
    version: int = 0,
    episode: str = "main-1-1",
    auxiliary_call: str = "",
    constrained: tuple[str, ...] = (),
) -> CallRecord:
    """Make a call with one choice for each of `sampled`. `prompt_tokens` defaults to the correct number."""
    before = 0
    if parent is not None:
        before = parent.prompt_tokens + len(parent.choices[parent_choice].tokens) // 4
    return CallRecord(
        id=name,
        engine="main",
        run=1,
        episode=episode,
        parent=None if parent is None else CallRef(1, parent.id, digest(encode_record(parent))),
        parent_choice=parent_choice,
        prompt_tail=pack_tokens(tail),
        prompt_tokens=before + len(tail) if prompt_tokens is None else prompt_tokens,
        choices=tuple(
            Choice(
                tokens=pack_tokens(tokens),
                logprobs=pack_logprobs([logprob] * len(tokens)),
                spans=spans_of([version] * len(tokens)),
            )
            for tokens in sampled
        ),
        sampling=SamplingParams(temperature=temperature),
        status=status,
        auxiliary_call=auxiliary_call,
        constrained=constrained,
    )


def episode(
    name: str, reward: float, *records: CallRecord, call_rewards: tuple[float, ...] | None = None
) -> EpisodeCalls:
    return EpisodeCalls(episode=name, reward=reward, records=records, call_rewards=call_rewards)


def item(tokens: Sequence[int], trained: Sequence[int], first_id: int = 0, temperature: float = 1.0) -> TrainingItem:
    """Make a sequence whose tokens at the positions `trained` are trained, with advantages 1 and weights 1."""
    positions = np.array(trained, dtype=np.int64)
    all_tokens = np.array(tokens, dtype=np.int64)
    ones = np.ones(len(positions), dtype=np.float32)
    ids = np.arange(first_id, first_id + len(positions))
    terms = Terms(ids, all_tokens[positions], ones * np.float32(temperature), -ones, ones, ones)
    return TrainingItem(all_tokens, positions, terms)


def tiny_model_folder(
    folder: Path, tied: bool = False, dtype: torch.dtype = torch.float32, hidden_size: int = 32
) -> Path:
    """Save a Llama of two layers with grouped-query attention. Token 7 is the word `w7`."""
    shape = {"vocab_size": VOCAB, "hidden_size": hidden_size, "max_position_embeddings": 512}
    small_llama(**shape, tie_word_embeddings=tied).to(dtype).save_pretrained(folder)
    return tiny_tokenizer(folder)


def tiny_tokenizer(folder: Path) -> Path:
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def tiny_settings(rollout: Mapping[str, int] = {}, /, **changes: object) -> TrainerSettings:
    """Make settings for the tiny model: `changes` are fields of `TrainerSettings` or of the trainer's part of a job.

    `model` is a job's part of that name, and `rollout` has lengths.

    All losses are clipped and corrected in the same way unless a test changes that.
    """
    own = {name: changes.pop(name) for name in list(changes) if name in TrainerSettings.model_fields}
    model = changes.pop("model", {})
    same = {"lr": 1e-2, "weight_decay": 0.0, "clip_low": 0.2, "clip_high": 0.2, "correction": "token_tis"}
    job = validated({"rollout": dict(rollout), "model": model, "trainer": {**same, **changes}}, {})
    return TrainerSettings.model_validate({"job": job, **own})
