"""What clients demand of answers, through a whole hive on the bundled model, with vLLM as its replica."""

import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from bombus import Job, SwarmClient
from tests.vllm.hive import vllm_hive

ARGUMENTS = ("--dtype", "float32", "--vllm-eager", "--kv-cache-mb", "256", "--max-model-len", "1024")
JOB = Job(
    model="smollm2",
    batch_size=2,
    num_repeat=2,
    bombus={
        "model": {"dtype": "float32", "tools": "hermes"},
        "rollout": {
            "max_prompt_length": 640,
            "max_response_length": 384,
            "max_response_length_in_one_turn": 96,
            "max_model_len": 1024,
        },
        "trainer": {"lora_rank": 8, "max_tokens_per_bin": 1024},
    },
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Will it rain in Paris tomorrow?"}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Look outside.", "parameters": SCHEMA}}
    for name in ("weather", "forecast")
]


def model_of(client: SwarmClient, episode_type: Any) -> OpenAI:
    _, found = client.begin_episode(episode_type=episode_type)
    return OpenAI(base_url=found.base_url, api_key=found.api_key, timeout=600, max_retries=0)


def test_an_evaluation_gets_json_and_calls_as_it_demands_and_training_is_free(tmp_path: Path) -> None:
    with vllm_hive(tmp_path, *ARGUMENTS) as hive, SwarmClient(hive.url) as client:
        client.auto_sync_train_config_and_start_engine(JOB)
        evaluated = model_of(client, "eval").chat.completions.with_raw_response
        raw = evaluated.create(model="any", messages=MESSAGES, response_format=FORMAT, seed=1)
        assert "x-bombus-overridden" not in raw.headers
        value = json.loads(raw.parse().choices[0].message.content or "")
        assert value["city"] in ("Paris", "Rome")
        assert isinstance(value["rain"], bool)

        raw = evaluated.create(
            model="any",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "forecast"}},
            parallel_tool_calls=False,
            seed=1,
        )
        assert "x-bombus-overridden" not in raw.headers
        choice = raw.parse().choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "forecast"
        assert set(json.loads(call.function.arguments)) == {"city", "rain"}

        trained = model_of(client, "train").chat.completions.with_raw_response
        raw = trained.create(model="any", messages=MESSAGES, response_format=FORMAT, max_tokens=4)
        assert raw.headers["x-bombus-overridden"] == "response_format"
