"""`bombus slime`, as it is typed."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bombus.cli import main
from bombus.commands.slime import job_of
from bombus.config.flags import Parser, add_settings_arguments, settings_from
from bombus.errors import Refused
from bombus.slime.functions import load_function, make_slime_importable
from bombus.slime.generation import load_tokenizer
from bombus.slime.prompts import PromptSource, read_prompts
from bombus.slime.settings import SlimeOptions
from tests.gateway.openai_hive import FILES, GatewayHive, says
from tests.slime.test_driver import ANSWER, HOOKS, JOB, PROMPT, WRONG

__all__ = ["JOB"]  # of `served`

PLAYABLE = ("--prompt-data", "train.jsonl", "--hf-checkpoint", "model")


def typed(*words: str) -> SlimeOptions:
    parser = Parser()
    add_settings_arguments(parser, SlimeOptions)
    return settings_from(SlimeOptions, parser.parse_args([*words]))


async def test_a_rollout_is_played_from_the_command_line(served: GatewayHive, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": PROMPT, "answer": "fine"}))
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime/__init__.py").write_text("import ray")  # a checkout of slime is the working directory
    served.replica.scripts.extend([says(ANSWER), says(WRONG)])
    words = ["--server-url", served.base_url, "--hf-checkpoint", str(tmp_path), "--prompt-data", "train.jsonl"]
    words += ["--input-key", "prompt", "--label-key", "answer", "--rollout-batch-size", "1"]
    words += ["--n-samples-per-prompt", "2", "--reward-key", "score"]
    words += ["--custom-generate-function-path", f"{HOOKS}:generate"]
    words += ["--custom-rm-path", f"{HOOKS}:reward_where_many_files_are_allowed"]
    words += ["--rollout-max-response-len", "100", "--save-debug-rollout-data", "{rollout_id}.pt"]
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh", sys.executable, "-m", "bombus", "slime", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert "rollout 0: 1 groups, mean reward 0.500" in said.decode()
    assert process.returncode == 0
    await served.until(lambda engine: len(engine.pool) == 2)
    assert (tmp_path / "0.pt").is_file()


def test_where_slime_is_installed_its_package_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime/__init__.py").write_text("")
    before = [*sys.path, str(tmp_path)]
    monkeypatch.setattr(sys, "path", [*before])
    assert not make_slime_importable()
    assert sys.path == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "there is nothing to play: give --prompt-data FILE and --hf-checkpoint MODEL"),
        ((*PLAYABLE, "--use-tis"), "settings of the trainer: give --job FILE"),
        ((*PLAYABLE, "--rm-type", "dapo"), "--rm-type dapo is not offered: name one with --custom-rm-path"),
        ((*PLAYABLE, "--rollout-temperature", "-1"), "--rollout-temperature"),
        ((*PLAYABLE, "--server-url", "here"), "is not the address of a hive"),
        ((*PLAYABLE, "--apply-chat-template-kwargs", "[]"), "is not a JSON object"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_words(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slime", *words]) == 2
    assert why in capsys.readouterr().err


def test_corrections_and_sizes_become_settings_of_the_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("bombus:\n  model: {path: models/bumble}\n  trainer: {lr: 0.125}\n")
    options = typed(*PLAYABLE, "--use-tis", "--tis-clip", "2.5", "--job", str(file))
    run = job_of(options).run
    assert (run.trainer.lr, run.trainer.tis_clip, run.trainer.correction) == (0.125, 2.5, "token_tis")
    assert (run.rollout.num_repeat, run.collection.batch_size) == (4, 32)
    args = options.namespace()
    assert (args.use_tis, args.tis_clip, args.rollout_batch_size, args.n_samples_per_prompt) == (True, 2.5, 32, 4)
    assert (args.rollout_max_response_len, args.rollout_temperature, args.partial_rollout) == (8192, 1.0, False)


def test_a_hook_file_loads_the_tokenizer_of_a_model_that_comes_with_bombus_by_what_args_has() -> None:
    load_tokenizer("tiny")
    args = typed("--prompt-data", "train.jsonl", "--hf-checkpoint", "tiny").namespace()
    assert AutoTokenizer.from_pretrained(args.hf_checkpoint).encode("a") == load_tokenizer("tiny").encode("a")
    assert typed(*PLAYABLE).namespace().hf_checkpoint == "model"


def test_prompts_come_in_the_order_of_the_file_and_again(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"input": "a", "metadata": {"k": 1}}\n\n{"input": "b", "tools": "[]"}\n')
    options = typed(*PLAYABLE, "--n-samples-per-prompt", "2")
    source = PromptSource(options, read_prompts(path, options, None))
    groups = [source.group() for _ in range(3)]
    assert [[sample.prompt for sample in group] for group in groups] == [["a", "a"], ["b", "b"], ["a", "a"]]
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert (groups[0][0].metadata, groups[1][0].metadata, groups[2][0].group_index) == ({"k": 1}, {"tools": []}, 2)


async def test_the_first_run_of_the_page_is_read_as_it_is_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/slime.md").read_text()
    hooks, prompts, command = re.findall(r"```(?:python|json|sh)\n(.*?)```", page, re.DOTALL)[:3]
    (tmp_path / "hooks.py").write_text(hooks)
    (tmp_path / "prompts.jsonl").write_text(prompts)
    options = typed(*shlex.split(command)[2:])
    assert options.prompt_data is not None
    assert options.custom_rm_path is not None
    samples = read_prompts(tmp_path / options.prompt_data, options, None)
    reward = load_function(f"{tmp_path}/{options.custom_rm_path.replace('.', '.py:')}")
    samples[0].response = "2 ok"
    assert await reward(options.namespace(), samples[0]) == 0.25
    assert len(samples) == options.rollout_batch_size


def test_a_shuffled_file_comes_in_another_order_each_time_and_in_the_same_ones_for_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"input": "{letter}"}}\n' for letter in "abcdefgh"))

    def orders(seed: int) -> list[str]:
        options = typed(*PLAYABLE, "--rollout-shuffle", "--rollout-seed", str(seed))
        source = PromptSource(options, read_prompts(path, options, None))
        return ["".join(source.group()[0].prompt for _ in range(8)) for _ in range(3)]

    first = orders(7)
    assert [sorted(order) for order in first] == [[*"abcdefgh"]] * 3
    assert len({*first, *orders(42), "abcdefgh"}) == 7
    assert orders(7) == first


def test_a_prompt_may_be_any_value_that_is_not_made_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"index": 0}\n{"index": {"task": 3}}\n')
    options = typed(*PLAYABLE, "--input-key", "index")
    assert [sample.prompt for sample in read_prompts(path, options, None)] == [0, {"task": 3}]
    with pytest.raises(Refused, match="'index' is neither a string nor a list of messages"):
        read_prompts(path, typed(*PLAYABLE, "--input-key", "index", "--apply-chat-template"), None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1 is not a prompt"),
        ('{"input": null}', "it has no 'input'; choose another field with --input-key"),
        ('{"prompt": "a"}', "choose another field with --input-key"),
        ('{"input": "a", "metadata": []}', "choose another field with --metadata-key"),
        ("", "has no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(line: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(Refused, match=why):
        read_prompts(tmp_path / "train.jsonl", typed(*PLAYABLE), None)


def test_arguments_that_hook_files_look_for_in_vain_are_said_in_words() -> None:
    args = typed(*PLAYABLE).namespace()
    with pytest.raises(AttributeError, match=r"args\.max_tokens_per_gpu has no value here: give --max-tokens-per-gpu"):
        _ = args.context_parallel_size * args.max_tokens_per_gpu
    with pytest.raises(AttributeError, match=r"args\.num_layers has no value here: docs/slime\.md says"):
        _ = args.num_layers
    assert getattr(args, "num_layers", None) is None
    given = typed(*PLAYABLE, "--max-tokens-per-gpu", "9216").namespace()
    assert given.context_parallel_size * given.max_tokens_per_gpu == 9216
