"""`bombus replay batch`: writes a step's batch from the log to a file that can be read without bombus."""

import argparse
import asyncio
import json
from pathlib import Path

import msgspec

from bombus.bus import BlobMissing
from bombus.errors import BombusError, LogCorrupted
from bombus.hive.decoding import decoded
from bombus.replay.logged_run import LoggedRun, client_metadata, read_run
from bombus.replay.opening import add_source_arguments, open_source
from bombus.replay.source import Source
from bombus.terminal import complain, say
from bombus_trainer.data.batch import prepare
from bombus_trainer.data.reading import read_batch
from bombus_trainer.data.sample_files import SUFFIXES, write
from bombus_trainer.data.samples import Origin, Sample, samples_of, text_of
from bombus_trainer.settings import TrainerSettings

VOCABULARY_MAX = 2**31 - 1  # used if the log lacks the model's configuration: any token that fits into a record

_files = msgspec.msgpack.Decoder(dict[str, bytes])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_arguments(parser)
    parser.add_argument("step", type=int, metavar="STEP", help="the optimizer step whose batch is written")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help=f"the file to write: {' or '.join(SUFFIXES)}"
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", metavar="NAME", help="the engine; required if the hive has several")
    parser.add_argument("--run", type=int, metavar="R", help="which run of the engine (default: the newest)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.out.suffix not in SUFFIXES:
        complain(f"bombus replay batch: --out must be a file ending in {' or '.join(SUFFIXES)}")
        return 2
    try:
        return asyncio.run(_run(arguments))
    except BombusError as error:
        complain(f"bombus replay batch: {error}")
        return 1


async def _run(arguments: argparse.Namespace) -> int:
    async with open_source(arguments) as source:
        logged = await read_run(source, arguments.engine, arguments.run)
        samples = await batch_samples(source, logged, arguments.step)
    write(arguments.out, arguments.step, samples)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    episodes = len({sample.metadata["bombus"]["episode"] for sample in samples})
    rewards = sum(sample.reward for sample in samples) / max(len(samples), 1)
    say(
        f"{arguments.out}: step {arguments.step} of run {logged.run}, engine {logged.engine}: {len(samples)} samples "
        f"of {episodes} episodes, {trained} trained tokens, mean reward {rewards:.3f}"
    )
    return 0


async def batch_samples(source: Source, logged: LoggedRun, number: int) -> list[Sample]:
    """Return the samples of a step's batch. Raises `NotOnLog`, or `LogCorrupted` if all of its calls are gone."""
    step = logged.step(number)
    files = await _tokenizer(source, logged.tokenizer)
    max_staleness, auxiliary_calls = (
        logged.job.to_collection().trained_staleness,
        logged.job.rollout.trains_auxiliary_calls,
    )
    read = await read_batch(source, step.batch, max_staleness, auxiliary_calls=auxiliary_calls)
    for episode, why in read.lost.items():
        complain(f"episode {episode} is left out: {why}")
    for episode, age in read.stale.items():
        complain(f"episode {episode} is left out: it is {age} versions old")
    if read.lost and not any(group.episodes for group in read.groups):
        raise LogCorrupted(f"the calls of step {number} are no longer in the log: {next(iter(read.lost.values()))}")
    config = json.loads(files.get("config.json", b"{}"))
    vocabulary = int(config.get("vocab_size", VOCABULARY_MAX))
    settings = TrainerSettings.of_job(logged.job)
    prepared = prepare(read.groups, settings, vocabulary)
    if not prepared.is_estimated:
        complain(
            f"the samples have no advantages: {settings.verl_adv_estimator} is verl's, computed only in its environment"
        )
    decode = None
    if "tokenizer.json" in files:
        try:
            decode = text_of(files["tokenizer.json"])
        except ValueError as error:
            complain(f"the samples have no texts: {error}")
    origin = Origin(logged.engine, logged.run, number)
    return samples_of(origin, read.groups, prepared, decode, await client_metadata(source, step))


async def _tokenizer(source: Source, name: str) -> dict[str, bytes]:
    try:
        return decoded(_files.decode, await source.blob(name))
    except (BlobMissing, msgspec.MsgspecError) as error:
        complain(f"the samples have no texts: {error}")
        return {}
