"""`bombus slime`: plays prompts with slime's hook files, unmodified, as episodes of a hive."""

import argparse
import asyncio
import signal

from bombus.config.flags import add_settings_arguments, settings_from
from bombus.errors import BombusError, Code, Refused
from bombus.host.process import is_heeded
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.job import Job
from bombus.slime.driver import SlimeDriver
from bombus.slime.functions import make_slime_importable
from bombus.slime.generation import load_tokenizer
from bombus.slime.http import close_client
from bombus.slime.prompts import PromptSource, read_prompts
from bombus.slime.pushing import push_rollouts
from bombus.slime.saved import check_can_save
from bombus.slime.settings import SlimeOptions
from bombus.terminal import complain, say

TERMINATED = 143  # as a shell reports a program that SIGTERM has ended
EPILOG = """\
example:
  bombus slime --prompt-data train.jsonl --input-key prompt --label-key answer --hf-checkpoint models/qwen \\
    --custom-generate-function-path generate_with_search.py:generate \\
    --custom-rm-path generate_with_search.py:reward_func

docs/slime.md says which of slime's names are there, and what is done otherwise.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_settings_arguments(parser, SlimeOptions)


def run(arguments: argparse.Namespace) -> int:
    options = settings_from(SlimeOptions, arguments)
    try:
        return asyncio.run(play(options))
    except Refused:
        raise
    except BombusError as error:
        complain(f"bombus slime: {error}")
        return 1
    except asyncio.CancelledError:
        return TERMINATED


async def play(options: SlimeOptions) -> int:
    """Do what the options say. Returns the exit code."""
    this = asyncio.current_task()
    assert this is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if is_heeded(ending):
            asyncio.get_running_loop().add_signal_handler(ending, this.cancel)
    async with AsyncSwarmClient(options.server_url, verbose=False, engine=options.engine) as client:
        if options.load_debug_rollout_data:
            return await push_rollouts(options, say)
        if not make_slime_importable():
            why = "slime itself is installed here, whose modules need its own servers: use an environment without it"
            raise Refused(Code.BAD_CONFIG, why)
        if options.save_debug_rollout_data:
            check_can_save(options.save_debug_rollout_data)
        assert options.prompt_data is not None
        source = PromptSource(
            options, read_prompts(options.prompt_data, options, load_tokenizer(options.hf_checkpoint))
        )
        if options.job is not None:
            await client.auto_sync_train_config_and_start_engine(_job(options))
        try:
            async with SlimeDriver(options, client, source, say) as driver:
                await driver.run()
        finally:
            await close_client()
    return 0


def _job(options: SlimeOptions) -> Job:
    return Job(
        base_yaml_config=options.job,
        num_repeat=options.n_samples_per_prompt,
        batch_size=options.rollout_batch_size,
        bombus=options.job_overrides,
    )
