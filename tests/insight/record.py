"""Record the run that docs/sql.md and examples/a_run.ipynb show: `python -m tests.insight.record` (some minutes) writes
examples/letters.bombuslog.

The model `tiny` learns to answer with digits. It is asked for letters as well, which it never gives; answers to `long`
tasks are cut at the job's limit, a client's environment fails now and then, and some versions are evaluated.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from openai import Omit

from bombus import Credentials, InfraError, Job, SwarmClient, Task, WorkflowOutput
from tests.logs.record import OPENAI, hive

LOG = Path(__file__).parents[2] / "examples" / "letters.bombuslog"
STEPS = 16
NUM_REPEAT = 4
JOB = Job(
    model="tiny",
    batch_size=4,
    num_repeat=NUM_REPEAT,
    lr=1e-2,
    max_prompt_length=32,
    max_response_length=64,
    max_response_length_in_one_turn=12,
    max_model_len=96,
    swarm_mode_sample_collection_method="rollout_until_finish_enough_tasks",
)
TASKS = (
    Task(task_id="digit", main_query="1", data_set="digits"),
    Task(task_id="digits", main_query="12", data_set="digits"),
    Task(task_id="long", main_query="123", data_set="digits"),
    Task(task_id="capitals", main_query="A", data_set="letters"),
)


class Agent:
    """Asks the model, and rewards the share of digits in its answer. Every `fails`th episode fails."""

    def __init__(self, fails: int = 0) -> None:
        self._fails = fails
        self._played = 0

    def __call__(self, task: Task, credentials: Credentials) -> WorkflowOutput:
        self._played += 1
        if self._fails and self._played % self._fails == 0:
            raise InfraError("the tool's server was away")
        model = OPENAI.with_options(base_url=credentials.base_url, api_key=credentials.api_key)
        reply = model.chat.completions.create(
            model=credentials.model,
            messages=[{"role": "user", "content": task.main_query}],
            max_tokens=Omit() if task.task_id == "long" else 5,
        )
        answer = reply.choices[0].message.content or ""
        wanted = str.isdigit if task.data_set == "digits" else str.isupper
        share = sum(map(wanted, answer)) / max(len(answer), 1)
        return WorkflowOutput(
            reward=share, is_success=share > 0.9, log_metrics={"characters": float(len(answer)), "share": share}
        )


def play(url: str) -> None:
    with SwarmClient(url, verbose=False) as first, SwarmClient(url, verbose=False) as second:
        first.auto_sync_train_config_and_start_engine(JOB)
        reliable, unreliable = Agent(), Agent(fails=13)
        for step in range(STEPS):
            for number, task in enumerate(TASKS):
                client, agent = (second, unreliable) if number == 1 else (first, reliable)
                client.run_group(task, agent, NUM_REPEAT, replace_infra=NUM_REPEAT)
            if step % 5 == 4:
                for task in TASKS:
                    first.run_group(task, reliable, 2, episode_type="eval")
        first.wait_for_status("ENGINE.ROLLING")
        first.stop_engine()


def main() -> None:
    if LOG.exists():
        sys.exit(f"{LOG} is recorded already: remove it first")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        with hive(data) as (url, _):
            play(url)
        subprocess.run([sys.executable, "-m", "bombus", "log", "export", str(LOG), "--data", str(data)], check=True)


if __name__ == "__main__":
    main()
