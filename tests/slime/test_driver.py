"""Hook files in slime's own shape, played against a whole hive with a replica that is scripted."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from bombus import AsyncSwarmClient
from bombus.bus import Bus
from bombus.errors import BombusError, Refused
from bombus.hive.generation import Generate
from bombus.hive.records import CallRecord, decode_record, unpack_tokens
from bombus.sdk.core import EpisodeReport
from bombus.sdk.errors import EngineOffline
from bombus.slime.driver import Notify, RolloutReport, SlimeDriver
from bombus.slime.functions import load_function, make_slime_importable
from bombus.slime.generation import GenerateState, load_tokenizer
from bombus.slime.http import close_clients
from bombus.slime.prompts import PromptSource, read_prompts
from bombus.slime.pushing import groups_of
from bombus.slime.saved import load_rollout
from bombus.slime.settings import SlimeOptions
from tests.gateway.openai_hive import FILES, TEMPLATE, TEXT, GatewayHive, Send, gateway_hive, says

HOOKS = Path(__file__).parent / "programs/search_turns.py"
JOB: dict[str, Any] = {
    "bombus": {
        "model": {"path": "models/bumble", "tools": "hermes"},
        "rollout": {
            "num_repeat": 2,
            "max_prompt_length": 1200,
            "max_response_length": 800,
            "max_response_length_in_one_turn": 200,
        },
        "collection": {"batch_size": 2},
    }
}
SEARCH, ANSWER, WRONG = "I look <search>weather</search>", "so <answer>fine</answer>", "so <answer>bad</answer>"
FOUND = "<information>the weather is fine</information>"
PROMPT = "what is the weather?"


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let hooks import `slime` for the time of a test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    GenerateState.clear()
    load_function.cache_clear()
    assert make_slime_importable()
    yield
    GenerateState.clear()
    for name in [name for name in sys.modules if name == "slime" or name.startswith("slime.")]:
        del sys.modules[name]
    sys.modules.pop("search_turns", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


def options_of(served: GatewayHive, model: str, folder: Path, **more: Any) -> SlimeOptions:
    lines = [{"prompt": PROMPT, "answer": "fine", "extra": {"document": "the weather is fine"}}] * 4
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = {
        "server_url": served.base_url,
        "hf_checkpoint": model,
        "prompt_data": folder / "train.jsonl",
        "input_key": "prompt",
        "label_key": "answer",
        "metadata_key": "extra",
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "num_rollout": 1,
        "rollout_max_response_len": 100,
        "custom_generate_function_path": f"{HOOKS}:generate",
        "custom_rm_path": f"{HOOKS}:reward_func",
        "reward_key": "score",
        "sglang_server_concurrency": 1,
    }
    return SlimeOptions(**{**given, **more})


@asynccontextmanager
async def driving(
    options: SlimeOptions, tell: Notify = lambda line: None, kind: type[AsyncSwarmClient] = AsyncSwarmClient
) -> AsyncIterator[SlimeDriver]:
    assert options.prompt_data is not None
    prompts = read_prompts(options.prompt_data, options, load_tokenizer(options.hf_checkpoint))
    async with kind(options.server_url, verbose=False) as client:
        try:
            async with SlimeDriver(options, client, PromptSource(options, prompts), tell, touch_s=0.05) as driver:
                yield driver
        finally:
            await close_clients()


async def played(options: SlimeOptions, tell: Notify = lambda line: None) -> list[RolloutReport]:
    async with driving(options, tell) as driver:
        return await asyncio.wait_for(driver.run(), 60)


async def played_with_nothing_left_open(served: GatewayHive, options: SlimeOptions) -> RolloutReport:
    """Play a rollout. When it has ended no episode may be open, although the driver is."""
    async with driving(options) as driver:
        report = await asyncio.wait_for(driver.rollout(0), 60)
        await served.until(lambda engine: not engine.open)
    return report


async def ended(served: GatewayHive, count: int) -> dict[str, Sequence[CallRecord]]:
    """Return the calls of the episodes in the pool, once there are so many."""
    await served.until(lambda engine: len(engine.pool) >= count)
    found: dict[str, Sequence[CallRecord]] = {}
    for episode, one in served.engine.pool.items():
        stored = await served.bus.get_many(served.bus.subjects.calls_stream, [ref.seq for ref in one.calls])
        found[episode] = [decode_record(each.data, ref) for each, ref in zip(stored, one.calls, strict=True)]
    return found


async def test_a_hook_file_of_slimes_shape_plays_episodes_whose_calls_are_one_sequence(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.scripts.extend(says(text) for text in (SEARCH, ANSWER, SEARCH, WRONG))
    save = tmp_path / "rollout_{rollout_id}.jsonl"
    (report,) = await played(options_of(served, model, tmp_path, save_debug_rollout_data=str(save)))
    assert (report.kept, sorted(report.rewards)) == (1, [0.0, 1.0])
    pool = await ended(served, 2)
    assert sorted(one.reward for one in served.engine.pool.values()) == [0.0, 1.0]
    samples = {sample.response: sample for sample in load_rollout(tmp_path / "rollout_0.jsonl")}
    assert set(samples) == {SEARCH + FOUND + ANSWER, SEARCH + FOUND + WRONG}
    for first, second in pool.values():
        assert second.parent is not None
        assert second.parent.id == first.id, "the second turn goes on from the tokens of the first"
        asked = unpack_tokens(first.prompt_tail)
        assert asked == TEXT.tokenizer.encode(PROMPT)
        said = [*first.choices[0].token_ids(), *unpack_tokens(second.prompt_tail), *second.choices[0].token_ids()]
        assert TEXT.tokenizer.decode(unpack_tokens(second.prompt_tail)) == FOUND
        sample = samples[TEXT.tokenizer.decode(said)]
        assert sample.tokens == asked + said, "what is trained is what the hook has written down"


async def test_groups_whose_rewards_are_equal_are_dropped_and_others_take_their_place(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.scripts.extend(says(text) for text in (WRONG, WRONG, ANSWER, WRONG))
    zero = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    (report,) = await played(options_of(served, model, tmp_path, dynamic_sampling_filter_path=zero))
    assert report.dropped == {"zero_std_0.0": 1}
    assert sorted(report.rewards) == [0.0, 1.0]
    await ended(served, 2)
    assert len(served.engine.pool) == 2, "the episodes of the group that was dropped are in no batch"
    assert not served.engine.open


async def test_what_a_batch_does_not_need_is_aborted_and_counted(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    held = asyncio.Event()

    async def slowly(request: Generate, send: Send) -> None:
        await held.wait()

    served.replica.scripts.extend([says(ANSWER), says(WRONG)])
    served.replica.otherwise = slowly
    (report,) = await played(
        options_of(served, model, tmp_path, over_sampling_batch_size=2, sglang_server_concurrency=2)
    )
    held.set()
    assert (report.kept, report.unused) == (1, 1)
    await served.until(lambda engine: not engine.open)


async def test_samples_of_one_attempt_with_rewards_of_their_own_reward_each_call(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says("fine")
    options = options_of(served, model, tmp_path, custom_generate_function_path=f"{HOOKS}:two_agents")
    (report,) = await played(options)
    assert sorted(report.rewards) == [0.0, 0.0, 1.0, 1.0]
    pool = await ended(served, 2)
    assert {len(records) for records in pool.values()} == {2}
    assert [tuple(one.call_rewards or ()) for one in served.engine.pool.values()] == [(0.0, 1.0)] * 2


async def test_a_function_may_reward_the_samples_of_a_prompt_together(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:rewards_of_a_group"
    (report,) = await played(options_of(served, model, tmp_path, custom_rm_path=path, group_rm=True))
    assert report.rewards == [0.0, 0.5]


async def test_a_sample_that_a_filter_removes_is_not_trained(served: GatewayHive, model: str, tmp_path: Path) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:removes_the_first"
    options = options_of(served, model, tmp_path, rollout_sample_filter_path=path, n_samples_per_prompt=3)
    said: list[str] = []
    (report,) = await played(options, said.append)
    assert (report.removed, report.rewards) == (1, [1.0, 1.0])
    assert "1 of 3 samples of a prompt are not trained on unless others are removed" in said[0]
    await served.until(lambda engine: len(engine.pool) == 2 and not engine.open)


@pytest.mark.parametrize("option", ["rollout_sample_filter_path", "custom_generate_function_path"])
async def test_a_group_that_is_too_small_once_samples_are_removed_is_dropped_and_said(
    option: str, served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:{'removes_the_first' if 'filter' in option else 'generate_and_remove_every_other'}"
    options = options_of(served, model, tmp_path, num_rollout=9, **{option: path})
    why = r"8 groups in a row were lost.*has 1 samples left after 1 were removed, but the engine trains only on groups"
    async with driving(options) as driver:
        with pytest.raises(BombusError, match=why):
            await asyncio.wait_for(driver.run(), 60)
        await served.until(lambda engine: not engine.open)
    assert not served.engine.pool, "nothing waits there for a group that will never be full"


async def test_a_group_that_no_engine_would_fill_is_refused_before_anything_is_played(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    why = r"groups of 2 episodes \(rollout.num_repeat\), which --n-samples-per-prompt 1 never fills"
    with pytest.raises(Refused, match=why):
        await played(options_of(served, model, tmp_path, n_samples_per_prompt=1))
    assert not served.replica.requests
    served.replica.otherwise = says(ANSWER)
    alone = options_of(served, model, tmp_path, n_samples_per_prompt=1, debug_rollout_only=True)
    assert [report.kept for report in await played(alone)] == [1], "what is not trained may have any number"
    async with AsyncSwarmClient(served.base_url, verbose=False) as client:
        await client.stop_engine()
    with pytest.raises(EngineOffline):
        await played(options_of(served, model, tmp_path, n_samples_per_prompt=1))


async def test_where_episodes_are_counted_and_not_groups_any_number_is_trained(
    bus: Bus, model: str, tmp_path: Path
) -> None:
    collection = {"batch_size": 2, "method": "rollout_until_finish_enough_episodes"}
    async with gateway_hive(bus, {"bombus": {**JOB["bombus"], "collection": collection}}) as served:
        served.replica.otherwise = says(ANSWER)
        path = f"{HOOKS}:removes_the_first"
        (one,) = await played(options_of(served, model, tmp_path, n_samples_per_prompt=1))
        (two,) = await played(options_of(served, model, tmp_path, rollout_sample_filter_path=path))
        assert (one.kept, one.removed, two.kept, two.removed) == (1, 0, 1, 1)
        await served.until(lambda engine: len(engine.pool) == 2)


async def test_rewards_that_the_hive_refuses_lose_the_group_and_not_the_run(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:two_chats_with_their_own_rewards_at_first"
    options = options_of(served, model, tmp_path, custom_generate_function_path=path)
    report = await played_with_nothing_left_open(served, options)
    assert (report.kept, report.lost, len(served.engine.pool)) == (1, {"BadReward": 1}, 2)


async def test_a_group_of_which_an_episode_is_over_is_lost_whole(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    groups: list[str] = []

    class LosesOne(AsyncSwarmClient):
        async def end_episodes(self, ends: Sequence[EpisodeReport]) -> None:
            groups.append(ends[0][0].task_id)
            if len(groups) == 1:
                await self.abort_episode(ends[0][1])
            await super().end_episodes(ends)

    served.replica.otherwise = says(ANSWER)
    async with driving(options_of(served, model, tmp_path), kind=LosesOne) as driver:
        report = await asyncio.wait_for(driver.rollout(0), 60)
        await served.until(lambda engine: not engine.open)
    assert (report.kept, report.lost, len(groups)) == (1, {"EpisodeGone": 1}, 2)
    assert set(served.engine.by_task) == {groups[1]}


async def test_groups_that_are_dropped_are_said_while_the_batch_is_not_full(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.scripts.extend(says(text) for text in (WRONG, WRONG, WRONG, WRONG, ANSWER, WRONG))
    zero = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    said: list[str] = []
    await played(options_of(served, model, tmp_path, dynamic_sampling_filter_path=zero), said.append)
    assert said[:2] == [
        f"so far in rollout 0: 0 groups, mean reward -, {count} dropped (zero_std_0.0); continuing" for count in (1, 2)
    ]


async def test_lost_groups_end_the_run_only_where_none_is_played_between_them(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:gives_every_other_group_up"
    more: dict[str, Any] = {"num_rollout": 9, "debug_rollout_only": True, "n_samples_per_prompt": 1}
    reports = await played(options_of(served, model, tmp_path, custom_generate_function_path=path, **more))
    assert sum(report.lost["SampleAborted"] for report in reports) == 9


async def test_groups_that_are_too_small_end_the_run_only_where_none_is_ended_between_them(
    bus: Bus, model: str, tmp_path: Path
) -> None:
    async with gateway_hive(bus, {"bombus": {**JOB["bombus"], "collection": {"batch_size": 32}}}) as served:
        served.replica.otherwise = says(ANSWER)
        path = f"{HOOKS}:removes_the_first_of_every_other_group"
        more: dict[str, Any] = {"num_rollout": 9, "custom_generate_function_path": path}
        reports = await played(options_of(served, model, tmp_path, **more))
        assert sum(report.lost["too few left"] for report in reports) == 9
        await served.until(lambda engine: len(engine.pool) == 18 and not engine.open)


async def test_without_a_function_each_prompt_gets_one_answer(served: GatewayHive, model: str, tmp_path: Path) -> None:
    served.replica.otherwise = says(ANSWER)
    (report,) = await played(options_of(served, model, tmp_path, custom_generate_function_path=None))
    assert report.rewards == [1.0, 1.0]


async def test_more_of_an_answer_is_sampled_within_the_length_of_a_response(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says("fine")
    count = len(TEXT.tokenizer.encode("fine")) + 1  # and the token of the end
    path = f"{HOOKS}:generate_three_times"
    more: dict[str, Any] = {"custom_generate_function_path": path, "rollout_max_response_len": 2 * count + 1}
    await played(options_of(served, model, tmp_path, n_samples_per_prompt=1, debug_rollout_only=True, **more))
    assert [request.sampling.max_tokens for request in served.replica.requests] == [2 * count + 1, count]


async def test_samples_that_are_given_up_each_time_end_the_run_with_the_reason(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    path = f"{HOOKS}:generate_and_give_up"
    with pytest.raises(BombusError, match=r"8 groups in a row were lost.*returned an aborted sample"):
        await played(options_of(served, model, tmp_path, custom_generate_function_path=path))
    await served.until(lambda engine: not engine.open)
    assert not served.engine.pool


async def test_rollouts_alone_train_nothing(served: GatewayHive, model: str, tmp_path: Path) -> None:
    served.replica.otherwise = says(ANSWER)
    (report,) = await played(options_of(served, model, tmp_path, debug_rollout_only=True))
    assert report.rewards == [1.0, 1.0]
    await served.until(lambda engine: not engine.open)
    assert not served.engine.pool


@pytest.mark.parametrize("ending", ["pt", "jsonl"])
async def test_samples_that_a_hook_has_made_are_saved_with_their_group(
    ending: str, served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says("fine")
    path = f"{HOOKS}:generate_anew"
    save = str(tmp_path / f"rollout.{ending}")
    options = options_of(
        served, model, tmp_path, custom_generate_function_path=path, label_key=None, save_debug_rollout_data=save
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": 0}')
    said: list[str] = []
    await played(options, said.append)
    assert said[0] == f"{save} leaves out values that no file can contain: metadata.environment (object)"
    ((first, second),) = groups_of(load_rollout(Path(save)))
    assert (first.prompt, first.metadata, first.status.value) == ("task 1", {"turns": 1}, "completed")
    assert [(one.group_index, one.index) for one in (first, second)] == [(0, 0), (0, 1)]


async def test_a_reward_that_a_generate_function_has_given_is_kept(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    (report,) = await played(
        options_of(served, model, tmp_path, custom_generate_function_path=f"{HOOKS}:generate_and_score")
    )
    assert report.rewards == [0.75, 0.75]


async def test_where_a_generate_function_raised_is_said(served: GatewayHive, model: str, tmp_path: Path) -> None:
    options = options_of(served, model, tmp_path, custom_generate_function_path=f"{HOOKS}:generate_and_raise")
    with pytest.raises(BombusError, match=rf"is lost: KeyError\('document'\) at {HOOKS}, line \d+"):
        await played(options)


@pytest.mark.parametrize(
    "option", ["dynamic_sampling_filter_path", "rollout_sample_filter_path", "rollout_all_samples_process_path"]
)
async def test_a_filter_that_raises_is_named_and_ends_the_run(
    option: str, served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:keeps_nothing_for_it_raises"
    flag = f"--{option.replace('_', '-')} {path}"
    with pytest.raises(BombusError, match=rf"the function of {flag} raised KeyError: 'score' at {HOOKS}, line \d+"):
        await played(options_of(served, model, tmp_path, **{option: path}))
    await served.until(lambda engine: not engine.open)


async def test_what_cannot_be_done_here_ends_the_run_at_once(served: GatewayHive, model: str, tmp_path: Path) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:asks_for_what_is_not_there"
    with pytest.raises(Refused, match="offered only with strict_box_verify=True"):
        await played(options_of(served, model, tmp_path, custom_rm_path=path))
    await served.until(lambda engine: not engine.open)
    assert len(served.replica.requests) <= 2, "nothing is played again"


async def test_prompts_that_no_rollout_has_come_to_are_said(served: GatewayHive, model: str, tmp_path: Path) -> None:
    served.replica.otherwise = says(ANSWER)
    said: list[str] = []
    of_three = options_of(served, model, tmp_path, rollout_batch_size=3, num_rollout=None, debug_rollout_only=True)
    await played(of_three, said.append)
    assert len(said) == 2
    assert said[1] == ("1 of the 4 prompts were not begun in 1 rollouts of 3: --num-rollout 2 would begin all of them")
    await played(of_three.model_copy(update={"rollout_batch_size": 2}), said.append)
    assert [line.partition(":")[0] for line in said[2:]] == ["rollout 0", "rollout 1"], "these were all of them"
    await played(of_three.model_copy(update={"num_epoch": 2}), said.append)
    twice = "2 of the 8 prompts in 2 epochs were not begun in 2 rollouts of 3: --num-rollout 3 would begin all of them"
    assert said[-1] == twice


async def test_a_group_of_equal_rewards_is_kept_where_the_batch_would_not_be_filled(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(WRONG)
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    options = options_of(served, model, tmp_path, dynamic_sampling_filter_path=path, over_sampling_batch_size=2)
    (report,) = await played(options)
    assert (report.kept, report.dropped) == (1, {"zero_std_0.0": 1}), "the first is dropped, for another is under way"


async def test_a_group_that_is_played_when_the_batch_is_full_is_aborted(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:generate_two_at_a_time"
    more = {"over_sampling_batch_size": 2, "n_samples_per_prompt": 1, "sglang_server_concurrency": 2}
    report = await played_with_nothing_left_open(
        served, options_of(served, model, tmp_path, custom_generate_function_path=path, **more)
    )
    assert (report.kept, report.unused) == (1, 1)


async def test_a_group_that_is_played_while_the_last_of_the_batch_ends_is_aborted(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:generate_the_first_before_others"
    more: dict[str, Any] = {"over_sampling_batch_size": 2, "n_samples_per_prompt": 1, "sglang_server_concurrency": 2}
    more["dynamic_sampling_filter_path"] = f"{HOOKS}:tells_the_others"
    report = await played_with_nothing_left_open(
        served, options_of(served, model, tmp_path, custom_generate_function_path=path, **more)
    )
    assert (report.kept, report.unused) == (1, 1)


async def test_the_episode_of_an_attempt_that_failed_is_aborted(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:fails_at_first"
    options = options_of(served, model, tmp_path, custom_generate_function_path=path)
    assert (await played_with_nothing_left_open(served, options)).rewards == [1.0, 1.0]
    assert len(served.engine.pool) == 2


async def test_episodes_are_kept_alive_while_their_function_thinks(
    served: GatewayHive, model: str, tmp_path: Path
) -> None:
    kept: list[str] = []

    class Watched(AsyncSwarmClient):
        async def touch_episodes(self, episode_uuids: Sequence[str]) -> list[str]:
            kept.extend(episode_uuids)
            if episode_uuids:
                sys.modules["search_turns"].told.set()
            return await super().touch_episodes(episode_uuids)

    served.replica.otherwise = says(ANSWER)
    path = f"{HOOKS}:waits_until_told"
    async with driving(options_of(served, model, tmp_path, custom_generate_function_path=path), kind=Watched) as driver:
        report = await asyncio.wait_for(driver.rollout(0), 60)
    assert report.kept == 1
    assert {one.partition(".")[0] for one in kept} == {"main-1-1", "main-1-2"}
