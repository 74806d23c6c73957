"""An environment of Atropos, run in its own Python: as many letters `a` as can be had.

python environment.py ROLLOUTS INFERENCE KEY SERVER_TYPE TOKENIZER STEPS
"""

import asyncio
import itertools
import sys

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_manager import APIServerConfig
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

GROUP = 2
TOKENS = 6


class Letters(BaseEnv):
    name = "letters"

    async def setup(self):
        self.numbers = itertools.count()

    async def get_next_item(self):
        return {"messages": [{"role": "user", "content": f"{next(self.numbers)} a="}]}

    async def collect_trajectories(self, item):
        messages = item["messages"]
        asked = {"messages": messages, "n": GROUP, "max_tokens": TOKENS, "temperature": 1.0}
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=None)
        if self.server.servers[0].config.server_type == "openai":
            answer = await self.server.chat_completion(**asked)
            for choice in answer.choices:
                said = {"role": "assistant", "content": choice.message.content or ""}
                read = tokenize_for_trainer(self.tokenizer, [*messages, said])
                self._add(group, read["tokens"], read["masks"], said["content"])
            return group, []
        group["inference_logprobs"] = []
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(**asked)
            for choice, node in zip(answer.choices, managed.get_state()["nodes"], strict=True):
                self._add(group, node.tokens, node.masked_tokens, choice.message.content or "")
                group["inference_logprobs"].append(node.logprobs)
        return group, []

    def _add(self, group, tokens, masks, text):
        group["tokens"].append(tokens)
        group["masks"].append(masks)
        group["scores"].append(float(text.count("a")))

    async def evaluate(self):
        pass


def main():
    rollouts, inference, key, server_type, tokenizer, steps = sys.argv[1:]
    config = BaseEnvConfig(
        group_size=GROUP,
        max_token_length=64,
        tokenizer_name=tokenizer,
        use_wandb=False,
        rollout_server_url=rollouts,
        total_steps=int(steps),
        wandb_name="letters",
        ensure_scores_are_not_same=False,
        max_num_workers=4,
    )
    server = APIServerConfig(
        base_url=inference,
        api_key=key,
        model_name=tokenizer,
        server_type=server_type,
        health_check=server_type == "vllm",
        num_requests_for_eval=4,
    )
    asyncio.run(Letters(config, [server]).env_manager())


if __name__ == "__main__":
    main()
