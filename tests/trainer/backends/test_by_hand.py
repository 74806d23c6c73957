"""A whole update worked out without any of the trainer's code: each call alone, through plain transformers."""

from collections.abc import Iterable, Iterator
from math import sqrt
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bombus.hive.records import CallRecord, unpack_logprobs, unpack_tokens
from bombus_trainer.backends.torch.executor import Executor
from bombus_trainer.data.batch import EpisodeCalls, EpisodeGroup
from tests.trainer.small_batches import episode, tiny_model_folder, tiny_settings
from tests.verl.given import groups

HIGH, LOW, LENGTH = 1.5, 0.7, 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def batch() -> list[EpisodeGroup]:
    """Make three tasks, and one whose episodes all earned the same."""
    equal = (episode(f"equal-{each.episode}", 1.0, *each.records) for each in groups(9)[0].episodes)
    return [*groups(3), EpisodeGroup("equal", tuple(equal))]


def calls(records: Iterable[CallRecord]) -> Iterator[tuple[list[int], list[int], torch.Tensor, float]]:
    """Return prompt, completion, the sampler's logprobs and the temperature of each call."""
    so_far: dict[str, list[int]] = {}
    for record in records:
        prompt = (so_far[record.parent.id] if record.parent else []) + unpack_tokens(record.prompt_tail)
        (choice,) = record.choices
        so_far[record.id] = prompt + choice.token_ids()
        yield prompt, choice.token_ids(), torch.tensor(unpack_logprobs(choice.logprobs)), record.sampling.temperature


def weight(members: list[EpisodeCalls], one: EpisodeCalls, aggregation: str) -> float:
    counts = {each.episode: sum(record.completion_tokens() for record in each.records) for each in members}
    if aggregation == "token":
        return 1 / sum(counts.values())
    return 1 / (len(counts) * (counts[one.episode] if aggregation == "episode" else LENGTH))


def advantage(group: EpisodeGroup, one: EpisodeCalls) -> float:
    rewards = [each.reward for each in group.episodes]
    mean = sum(rewards) / len(rewards)
    return (one.reward - mean) / (sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) + 1e-6)


def by_hand(folder: Path, aggregation: str, loss: str, correction: str) -> tuple[float, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    members = [each for group in batch() for each in group.episodes]
    total = torch.zeros(())
    for group in batch():
        for one in group.episodes:
            for prompt, completion, sampler_N, temperature in calls(one.records):
                logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
                logprobs_N = torch.log_softmax(logits, -1)[torch.arange(len(completion)), torch.tensor(completion)]
                ratio_N = (logprobs_N - sampler_N).exp()
                constant_N = ratio_N.detach()
                if correction == "token_mask":
                    constant_N = constant_N * ((constant_N >= LOW) & (constant_N <= HIGH))
                plain_N = ratio_N if loss == "importance_sampling" else constant_N.clamp(max=HIGH) * logprobs_N
                total = total - (weight(members, one, aggregation) * advantage(group, one) * plain_N).sum()
    total.backward()
    squares = [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(total.detach()), float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("aggregation", ["token", "episode", "constant"])
@pytest.mark.parametrize(
    ("loss", "correction"), [("cispo", "token_tis"), ("cispo", "token_mask"), ("importance_sampling", "none")]
)
def test_an_update_equals_one_worked_out_by_hand(folder: Path, aggregation: str, loss: str, correction: str) -> None:
    """No micro-batch has a mean of its own, and tokens that are masked or earned nothing still count in the mean.

    cispo is compared because its loss is i A log pi, which depends on every token, whereas in -r A all r are 1.
    """
    wanted = by_hand(folder, aggregation, loss, correction)
    floor = LOW if correction == "token_mask" else 0.0
    for bin_tokens in (48, 4096):
        settings = tiny_settings(
            {"max_response_length": LENGTH, "max_response_length_in_one_turn": LENGTH},
            loss_aggregation=aggregation,
            loss=loss,
            correction=correction,
            clip_low=1.0,
            tis_clip=HIGH,
            tis_clip_low=floor,
            bin_tokens=bin_tokens,
        )
        found = Executor(folder, settings).train_step(batch(), 1)
        assert (found["loss"], found["grad_norm"]) == pytest.approx(wanted, rel=1e-4)
        assert (found["bins"] > 5, found["groups_without_signal"]) == (bin_tokens == 48, 1.0)
