"""Train one model in three roles: solvers, rewriters of what they found, and a selector that picks one rewrite.

All calls of a round are one episode with a single end. A selector gets the reward of the rewrite that it chose, and
everybody gains from a right choice: all rewards are then 1.2 times, else 0.8 times, what they were.
"""

import asyncio
import random
import re

from common import arguments, job, run

from bombus import Rollout, RolloutBudgets, SwarmClient, Task, reward, success

NUM_PARALLEL, NUM_REPEAT = 3, 4


class SolveRewriteSelect:
    async def play(self, task, agents):
        async def ask(role, prompt, texts=()):
            listed = "".join(f"\n{number}: {text}" for number, text in enumerate(texts))
            return (await agents[role].ask(f"{task.main_query} {prompt}{listed}", max_tokens=64)).text

        self.chosen = ""
        solutions = await asyncio.gather(*(ask("solver", "") for _ in range(NUM_PARALLEL)))
        again = "Write the answer in your own words. Solutions:"
        rewrites = await asyncio.gather(*(ask("rewriter", again, solutions) for _ in range(NUM_PARALLEL)))
        if valid := [text for text in rewrites if re.search(r"\d", text)]:
            pick = re.search(r"\d+", await ask("selector", "Write the number of the best answer:", valid))
            self.chosen = valid[int(pick[0])] if pick and int(pick[0]) < len(valid) else ""

    @reward(high=1.2)
    def right(self, task, calls):
        factor = 1.2 if self.solved(task) else 0.8
        return [factor * is_right(task, self.chosen if call.role == "selector" else call.text) for call in calls]

    @success
    def solved(self, task):
        return is_right(task, self.chosen)


def is_right(task, text):
    return re.findall(r"\d+", text)[-1:] == [task.metadata["answer"]]


def main() -> None:
    options = arguments(__doc__ or "", model="smollm2")
    rollout = Rollout(SolveRewriteSelect, RolloutBudgets(turns_max=2 * NUM_PARALLEL + 1))
    with SwarmClient(options.url) as client:
        client.auto_sync_train_config_and_start_engine(job(options.model, 1, NUM_REPEAT))
        for step in range(options.steps):
            a, b = random.randint(2, 9), random.randint(2, 9)
            task = Task(task_id=f"{a}+{b}", main_query=f"What is {a} plus {b}?", metadata={"answer": str(a + b)})
            outputs = client.run_group(task, rollout, NUM_REPEAT, replace_infra=NUM_REPEAT)
            print(f"step {step}: {sum(bool(output and output.is_success) for output in outputs)} of {NUM_REPEAT} right")


if __name__ == "__main__":
    run(main)
