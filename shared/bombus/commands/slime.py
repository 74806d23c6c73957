"""`bombus slime`: plays prompts with slime's hook files, unmodified, as episodes of a hive."""

import argparse
import asyncio
import resource

from bombus import task_groups
from bombus.config.flags import add_settings_arguments, settings_from
from bombus.errors import BombusError, Code, Refused, in_one_line
from bombus.machine.process import TERMINATED, cancel_at_signals
from bombus.sdk.aio import AsyncSwarmClient
from bombus.sdk.job import Job
from bombus.slime.driver import SlimeDriver
from bombus.slime.functions import make_slime_importable
from bombus.slime.generation import load_tokenizer
from bombus.slime.http import close_clients
from bombus.slime.local_server import LocalServer
from bombus.slime.prompts import PromptSource, read_prompts
from bombus.slime.pushing import push_rollouts
from bombus.slime.retrieval import Retrieval
from bombus.slime.saved import check_can_save
from bombus.slime.settings import SlimeOptions
from bombus.tasks.search.corpus import bundled_documents, read_documents
from bombus.tasks.search.index import LocalIndex
from bombus.terminal import complain, say

FILES_MAX = 65_536  # a running sample uses four: its port, and connections to it and to the hive
EPILOG = """\
example:
  bombus slime --prompt-data train.jsonl --input-key prompt --label-key answer --hf-checkpoint models/qwen \\
    --custom-generate-function-path generate_with_search.py:generate \\
    --custom-rm-path generate_with_search.py:reward_func

docs/slime.md says which of slime's names are supported, and what differs.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_settings_arguments(parser, SlimeOptions)


def run(arguments: argparse.Namespace) -> int:
    options = settings_from(SlimeOptions, arguments)
    _allow_files()
    try:
        return task_groups.run(play(options))
    except Refused:
        raise
    except BombusError as error:
        complain(f"bombus slime: {error}")
        return 1
    except asyncio.CancelledError:
        return TERMINATED


def _allow_files() -> None:
    """Raise this process's limit on open files, often 1,024, to the hard limit: samples beyond it would wait
    silently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def play(options: SlimeOptions) -> int:
    """Play the prompts, or push the saved rollouts, that the options specify. Returns the exit code."""
    cancel_at_signals()
    async with AsyncSwarmClient(options.server_url, verbose=False, engine=options.engine) as client:
        if options.load_debug_rollout_data:
            return await push_rollouts(options, say)
        if not make_slime_importable():
            why = "slime itself is installed here, and its modules need its own servers: use an environment without it"
            raise Refused(Code.BAD_CONFIG, why)
        if options.save_debug_rollout_data:
            check_can_save(options.save_debug_rollout_data)
        assert options.prompt_data is not None
        source = PromptSource(
            options, read_prompts(options.prompt_data, options, load_tokenizer(options.hf_checkpoint))
        )
        if options.job is not None:
            await client.auto_sync_train_config_and_start_engine(job_of(options))
        search = await _search(options)
        try:
            async with SlimeDriver(options, client, source, say) as driver:
                await driver.run()
        finally:
            await close_clients()
            if search is not None:
                await search.close()
    return 0


async def _search(options: SlimeOptions) -> LocalServer | None:
    """If a port is given, start serving the documents that hook files search."""
    if options.search_port is None:
        return None
    documents = read_documents(options.search_documents) if options.search_documents else bundled_documents()
    server = LocalServer(Retrieval(LocalIndex(documents)).answer)
    try:
        await server.open(options.search_port)
    except OSError as error:
        why = f"port {options.search_port} cannot be used ({in_one_line(error)}): give another --search-port"
        raise Refused(Code.BAD_CONFIG, why) from error
    return server


def job_of(options: SlimeOptions) -> Job:
    """Return the job of `--job`, overridden by the other options."""
    return Job(
        base_yaml_config=options.job,
        num_repeat=options.n_samples_per_prompt,
        batch_size=options.rollout_batch_size,
        bombus=options.job_overrides,
    )
