"""A valid request for every route of every HTTP server, from which the wrong ones are made.

`@episode@` and the like stand for what the hive that is running has: `Names` of tests/fuzz/http.py fills them in.
"""

from typing import Any

from tests.fuzz.values import Tree

CLIENT = "fuzz"
TRACEPARENT = f"00-{1:032x}-{2:016x}-01"
LENGTHS = {
    "max_prompt_length": 256,
    "max_response_length": 200,
    "max_response_length_in_one_turn": 64,
    "max_model_len": 512,
}
JOB: dict[str, Any] = {
    "ajet": {
        "model": {"path": "tiny"},
        "data": {"train_batch_size": 2},
        "rollout": {"num_repeat": 2, "max_env_worker": 64},
    },
    "bombus": {
        "model": {"path": "tiny", "dtype": "float32"},
        "rollout": {**LENGTHS, "allow_chat_template_kwargs": True, "sampling": "obey"},
        "collection": {"batch_size": 2, "drain_s": 5.0},  # many episodes are never ended by their clients
        "trainer": {"lr": 0.001},
    },
}
YAML = """\
ajet:
  model: {path: tiny}
  data: {train_batch_size: 2}
  rollout: {num_repeat: 2, max_env_worker: 64}
bombus:
  model:
    path: tiny
    dtype: float32
  rollout:
    max_prompt_length: 256
    max_response_length: 200
  trainer:
    lr: 1.0e-3
"""
ODD_YAML = (
    "&a [*a, *a]", "{<<: {a: 1}}", "{<<: [{a: 1}, {b: 2}]}", "*nothing", "0x" + "f" * 5000, "0b" + "1" * 5000, "0o777",
    "1:59:59", "1" + ":59" * 5000 + ".5", "!!python/object/apply:os.system [id]", "!!binary aGk=", "!!set {a, b}",
    "2001-12-14t21:59:43.10-05:00", ".inf", "-.INF", ".nan", "~", "? [a, b]\n: c", "|\n  text\n", ">-\n  text\n",
    "---\na: 1",
    "...\n", "%YAML 9.9\n---\n", "\t- tab", "'", '"\\xff"', "[" * 3000, "{a: " * 200 + "1" + "}" * 200, "yes", "01",
    "1_000", "9" * 5000,
    "&a {x: 1}\nb: *a", "a: 1\na: 2", "\ufeffa: 1", "@", "`", "!", "- - - - 1", "x" * 100_000, "\x07", "\ud800",
)  # fmt: skip

USER = {"role": "user", "content": "a0="}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"what": "a"}'}}
CHATS: list[Tree] = [
    {"model": "any", "messages": [USER], "max_tokens": 4},
    {
        "model": "any",
        "messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "b"}, USER],
        "max_tokens": 4,
        "temperature": 1.0,
        "n": 2,
        "seed": 7,
        "stop": ["x", "\n\n"],
        "logprobs": True,
        "top_logprobs": 3,
        "user": "u",
        "metadata": {"a": "b"},
    },
    {
        "model": "any",
        "messages": [
            USER,
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {
                "role": "user",
                "name": "bee",
                "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "b"}],
            },
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_completion_tokens": 3,
    },
    {
        "model": "any",
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 16,
        "top_p": 0.9,
        "top_k": 5,
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "text"},
        "frequency_penalty": 0,
        "logit_bias": {},
    },
]
COMPLETIONS: list[Tree] = [
    {"model": "any", "prompt": "a0=", "max_tokens": 4},
    {"model": "any", "prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 2, "stream": True, "echo": False, "best_of": 1},
]
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"what": "a", "n": 5.0}}
MESSAGES: list[Tree] = [
    {"model": "any", "messages": [USER], "max_tokens": 4},
    {
        "model": "any",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {"data": "x"}}]},
            {"role": "system", "content": "t"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "b"},
                    USE,
                    {**USE, "id": "c2", "input": {"INVALID_JSON": "{"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "found", "is_error": True},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c2",
                        "content": [{"type": "text", "text": "c"}, {"type": "tool_reference", "tool_name": "late"}],
                    },
                ],
            },
        ],
        "tools": [
            {"name": "look", "description": "d", "input_schema": {"type": "object", "properties": {}}},
            {"name": "late", "input_schema": {}, "type": "custom", "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        "metadata": {"user_id": "u"},
    },
    {
        "model": "any",
        "messages": [USER],
        "max_tokens": 16,
        "stream": True,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["x", "\n\n"],
    },
]
FUNCTION: Tree = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
}
TEXT: Tree = {"type": "input_text", "text": "a0="}
RESPONSES: list[Tree] = [
    {"model": "any", "input": "a0=", "max_output_tokens": 4},
    {
        "model": "any",
        "instructions": "s",
        "input": [
            {"type": "message", "role": "developer", "content": "d"},
            {"role": "user", "content": [TEXT, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}], "id": "msg_1"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"what": "a"}', "namespace": None},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+a", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": [TEXT]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {"type": "additional_tools", "role": "developer", "tools": [FUNCTION]},
        ],
        "tools": [
            {
                "type": "custom",
                "name": "patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start:"},
            },
            {"type": "namespace", "name": "more", "description": "d", "tools": [FUNCTION]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_output_tokens": 4,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "client_metadata": {"a": "b"},
    },
    {
        "model": "any",
        "input": [{"role": "user", "content": [TEXT]}],
        "previous_response_id": f"resp_{0:032x}",
        "stream": True,
        "temperature": 1.0,
        "top_p": 0.9,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
        "background": False,
        "metadata": {},
    },
]
OUTPUT = {
    "reward": 1.0,
    "is_success": True,
    "metadata": {"a": {"b": [1, "x"]}},
    "log_metrics": {"m": 0.5, "l": [1.0, 2.0]},
}
END = {"episode_uuid": "@episode@", "task_id": "t", "workflow_output": OUTPUT}
POLICY = {"ratio": 1.5, "expected_batch_size": 2, "expected_num_repeat": 2, "current_task_id": "t"}
EPISODES = ["@episode@", "@other@"]

SWARM: dict[str, list[Tree]] = {
    "/sync_train_config": [{"yaml_as_string": "@job@"}],
    "/compare_train_config": [{"yaml_as_string": "@job@"}],
    "/start_engine": [{}],
    "/stop_engine": [{}],
    "/resume_engine": [{}],
    "/stop_episode": [{"episode": "main-1-1"}],
    "/claim_episode": [
        {"client_uuid": CLIENT, "episode_type": "train", "discard_episode_timeout": 30.0, "throttle_policy": POLICY},
        {"client_uuid": CLIENT, "episode_type": "eval"},
    ],
    "/end_episode": [
        {"client_uuid": CLIENT, **END, "declare_client_active": True},
        {"client_uuid": CLIENT, **END, "workflow_output": {**OUTPUT, "reward": [0.5, 1.0]}},
        {"client_uuid": CLIENT, **END, "workflow_output": {**OUTPUT, "reward": {"0" * 32: 0.5, "1" * 32: 1.0}}},
    ],
    "/abort_episode": [{"client_uuid": CLIENT, "episode_uuid": "@other@"}],
    "/can_continue_episode": [{"client_uuid": CLIENT, "episode_uuid": "@episode@"}],
    "/get_episode_buffer": [{}],
    "/replay_latest_llm_call": [{"episode_uuid": "@episode@"}],
    "/agree_sync_weight": [{"client_uuid": CLIENT}],
    "/sync_train_code": [{"code": "print()"}],
    "/push_verbose_log": [{"tag": "t", "message": "m"}],
    "/claim_episodes": [
        {
            "client_uuid": CLIENT,
            "claim_id": "c",
            "count": 2,
            "episode_type": "train",
            "discard_episode_timeout": 30.0,
            "wait_s": 0.2,
            "waited_s": 1.0,
            "task_id": "t",
        },
        {"client_uuid": CLIENT, "claim_id": "d", "wait_s": 0.0, "sampler": "tinker://s-fuzz:train:0/sampler_weights/a"},
        {"client_uuid": CLIENT, "claim_id": "e", "wait_s": 0.0, "touches": True},
    ],
    "/end_episodes": [
        {"client_uuid": CLIENT, "episodes": [END, {**END, "episode_uuid": "@other@", "failure": "turns"}]},
        {"client_uuid": CLIENT, "episodes": [{**END, "workflow_output": {**OUTPUT, "reward": {"0" * 32: 0.5}}}]},
    ],
    "/abort_episodes": [
        {"client_uuid": CLIENT, "episode_uuids": EPISODES, "infra": True, "detail": "d", "failure": "grader"}
    ],
    "/touch_episodes": [{"client_uuid": CLIENT, "episode_uuids": EPISODES}],
    "/touch_client": [{"client_uuid": CLIENT}],
    "/claim_multi_model_episodes": [
        {
            "client_uuid": CLIENT,
            "claim_id": "j",
            "engines": ["main", "other"],
            "count": 2,
            "episode_type": "train",
            "discard_episode_timeout": 30.0,
            "wait_s": 0.2,
            "waited_s": 1.0,
            "task_id": "t",
        },
    ],
    "/end_multi_model_episodes": [
        {"client_uuid": CLIENT, "multi_model_episodes": [[END, {**END, "episode_uuid": "@other@"}]]},
    ],
    "/abort_multi_model_episodes": [
        {"client_uuid": CLIENT, "episode_uuids": ["@other@"], "infra": True, "detail": "d"}
    ],
    "/touch_multi_model_episodes": [{"client_uuid": CLIENT, "episode_uuids": EPISODES}],
    "/read_ended_episodes": [{"client_uuid": CLIENT, "episode_uuids": EPISODES}],
    "/take_ended_episodes": [{"client_uuid": CLIENT, "episode_uuids": EPISODES}],
}
TOKENIZE: list[Tree] = [
    {"prompt": "a0=", "return_token_strs": True},
    {"model": "any", "messages": [USER], "tools": [TOOL], "add_generation_prompt": False},
]
DETOKENIZE: list[Tree] = [{"model": "any", "tokens": [1, 2, 3]}]
MODEL_ID = "s-fuzz:train:0"
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 1.0}
DATUM = {
    "model_input": {"input_ids": [1, 2]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1.0, 0.5], "dtype": "float32", "shape": [2]},
    },
}
LOSS = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_params": {"z_loss_coef": 0.1}}
SAVE: list[Tree] = [
    {"model_id": "default", "seq_id": 1, "path": "a", "ttl_seconds": 60.0, "overwrite": True},
    {"model_id": MODEL_ID, "seq_id": 3, "sampling_session_seq_id": 1, "kind": "snapshot"},
]
TRAINING: dict[str, list[Tree]] = {
    "client/config": [{"sdk_version": "0.38.0"}],
    "client/dynamic_config": [{"sdk_version": "0.38.0"}],
    "telemetry": [{"events": [], "platform": "p", "session_id": "s-fuzz"}],
    "create_session": [{"tags": ["a"], "user_metadata": {"k": "v"}, "sdk_version": "0.38.0", "project_id": "p"}],
    "session_heartbeat": [{"session_id": "s-fuzz"}],
    "sessions/{session}/finish": [{"reason": {"type": "success"}, "detail": "d"}],
    "create_model": [
        {
            "session_id": "s-fuzz",
            "model_seq_id": 0,
            "base_model": "tiny",
            "user_metadata": {"k": "v"},
            "lora_config": {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": False},
            "optimizer_config": {"type": "adamw"},
        },
        {
            "model_id": "fuzzed",
            "base_model": "tiny",
            "lora_config": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]},
        },
    ],
    "forward_backward": [{"model_id": "default", "seq_id": 1, "forward_backward_input": LOSS}],
    "forward": [{"model_id": "default", "seq_id": 1, "forward_input": LOSS}],
    "optim_step": [
        {"model_id": "default", "seq_id": 2, "adam_params": ADAM, "learning_rate": 1e-3, "gradient_clip": 1.0},
        {"model_id": MODEL_ID, "seq_id": 2, "adam_params": ADAM},
    ],
    "abort_gradient_epoch": [{"model_id": "default", "seq_id": 1}],
    "save_weights": SAVE,
    "save_weights_for_sampler": SAVE,
    "save_weights_external": SAVE,
    "load_weights": [
        {"model_id": "default", "seq_id": 1, "path": "xorl://default/weights/a", "optimizer": True},
        {"session_id": "s-fuzz", "model_seq_id": 1, "path": f"tinker://{MODEL_ID}/weights/a", "optimizer": False},
    ],
    "unload_model": [{"model_id": "default"}],
    "kill_session": [{"model_id": "default", "save_checkpoint": True, "reset_weights": False}],
    "retrieve_future": [{"request_id": f"{MODEL_ID}:1", "allow_metadata_only": True}, {"request_id": "default:1.1"}],
    "get_info": [{"model_id": MODEL_ID}],
    "weights_info": [{"tinker_path": f"tinker://{MODEL_ID}/weights/a"}, {"xorl_path": "xorl://default/weights/a"}],
    "list_checkpoints": [{"model_id": "default"}],
    "training_runs/{model}/checkpoints/{kind}/{name}/ttl": [{"ttl_seconds": 60}],
    "sessions/search": [
        {
            "session_id": "s-fuzz",
            "display_name": "a b",
            "user_metadata": {"k": "v"},
            "owner": {"type": "user", "owner_urns": ["u"]},
            "statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}],
            "limit": 2,
            "cursor": {"last_created_at": "2026-11-23T00:00:00Z", "last_session_id": "s-fuzz"},
        }
    ],
    "delete_checkpoint": [{"model_id": "default", "checkpoint_id": "weights/a"}],
}
SAMPLED = {"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["a", 3]}
SAMPLING: dict[str, list[Tree]] = {
    "create_sampling_session": [
        {"session_id": "s-fuzz", "sampling_session_seq_id": 0, "base_model": "tiny"},
        {"session_id": "s-fuzz", "sampling_session_seq_id": 1, "model_path": f"tinker://{MODEL_ID}/sampler_weights/a"},
    ],
    "asample": [
        {
            "sampling_session_id": "s-fuzz:sample:0",
            "seq_id": 0,
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
            "sampling_params": SAMPLED,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }
    ],
}
GENERATED: list[Tree] = [
    {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 5, "n": 2, "stop": ["a"]},
        "return_logprob": True,
    }
]
VLLM: list[Tree] = [
    {"prompt": {"prompt_token_ids": [1, 2]}, "n": 2, "max_tokens": 4, "temperature": 0.5, "logprobs": 0},
    {"prompt": "Say a word.", "max_tokens": 4, "top_p": 0.9, "top_k": 5, "seed": 7, "stop_token_ids": [3]},
]
GROUP: Tree = {
    "tokens": [[1, 2], [3]],
    "masks": [[-100, 2], [3]],
    "scores": [1.0, 0.5],
    "advantages": [[0.0, 1.0], [0.5]],
    "inference_logprobs": [[1.0, -0.5], [-0.25]],
    "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
    "overrides": [{"set_advantage_to_zero": True}, {}],
    "group_overrides": {"a": 1},
    "env_id": 0,
}
SCORED: dict[str, list[Tree]] = {
    "/register": [
        {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": 4,
            "max_token_len": 64,
            "checkpoint_dir": "c",
            "save_checkpoint_interval": 1,
            "starting_step": 0,
            "num_steps": 2,
        }
    ],
    "/register-env": [{"max_token_length": 64, "desired_name": "a", "weight": 1.0, "group_size": 2}],
    "/disconnect-env": [{"env_id": 0}],
    "/scored_data": [GROUP],
    "/scored_data_list": [[GROUP, GROUP]],
}
NCCL: Tree = {"master_address": "", "master_port": 29600, "group_name": "g", "buffer_size_mb": 1024}
ENDPOINT: Tree = {"host": "localhost", "port": 1, "world_size": 1, "sync_weights": True, **NCCL}
SYNC: Tree = {"model_id": "default", "weight_version": "v1", "pools": ["default"], "quantization": None, **NCCL}
BODIES: dict[str, list[Tree]] = {
    **SWARM,
    **SCORED,
    **{f"/api/v1/{path}": bodies for path, bodies in {**TRAINING, **SAMPLING}.items()},
    "/generate": [*GENERATED, *VLLM],
    "/add_inference_endpoint": [ENDPOINT],
    "/remove_inference_endpoint": [{"host": "localhost", "port": 1}],
    "/sync_inference_weights": [SYNC],
    "/api/v1/sync_inference_weights": [SYNC],
    "/sleep": [{}],
    "/wake_up": [{}],
    "/v1/chat/completions": CHATS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/tokenize": TOKENIZE,
    "/v1/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/detokenize": DETOKENIZE,
    "/v1/embeddings": [{"model": "any", "input": "a"}],
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
}
ENDLESS = "/events"  # its answer has no end: clients hang up
WITHOUT_BODY = {
    "/v1/messages/x",
    "/v1/models/x",
    "/v1/responses/x",
    "/v1/x",
    "/get_engine_status",
    "/get_current_batch_rollout_pool_information",
    "/get_server_experiment_dir",
    "/v1/models",
    "/health",
    "/ready",
    ENDLESS,
    "/call_record",
    "/list_inference_endpoints",
    "/docs",
    "/metrics",
    "/metrics/replicas",
    "/openapi.json",
    "/api/v1/healthz",
    "/api/v1/get_server_capabilities",
    "/api/v1/session_info",
    "/api/v1/sessions",
    "/api/v1/sessions/{session}",
    "/api/v1/training_runs",
    "/api/v1/training_runs/{model}",
    "/api/v1/training_runs/{model}/checkpoints",
    "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}",
    *(
        f"/api/v1/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}/{what}"
        for what in ("archive", "external_weights_urls", "publish")
    ),
    "/api/v1/downloads/{link}/{file}",
    "/api/v1/sessions/{session}/project",
    "/api/v1/sessions/{session}/trace_export",
    "/api/v1/copy_weights",
    "/api/v1/audit",
    "/api/v1/billing/usage/events",
    "/api/v1/billing/usage/checkpoints/current",
    "/api/v1/checkpoints",
    "/api/v1/samplers/{sampler}",
    "/",
    "/batch",
    "/info",
    "/latest_example",
    "/reset_data",
    "/status",
    "/status-env",
    "/wandb_info",
}
GENERATE: Tree = {
    "id": "call-1",
    "engine": "main",
    "run": 1,
    "prompt": b"\x01\0\0\0\x02\0\0\0",
    "sampling": {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "top_logprobs": 2},
    "n": 1,
    "stream": True,
    "episode": "e",
    "traceparent": TRACEPARENT,
}
REPLICA: dict[tuple[str, str], Tree] = {
    ("POST", "/generate"): GENERATE,
    ("GET", "/adapters"): None,
    ("POST", "/adapters"): {"address": "0" * 64, "folder": "/nowhere"},
    ("DELETE", "/adapters/ADDRESS"): None,
    ("GET", "/health"): None,
    ("GET", "/metrics"): None,
}


def bare(path: str) -> str:
    """Return a path of the gateway without the prefix of an engine."""
    return path.removeprefix("/e/main")
