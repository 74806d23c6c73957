"""Look at a model's replies without training it: every episode is aborted, so none of them reaches a batch.

It can run beside other clients of the same engine: it has one episode at a time, of a short answer, which is given up
within a minute if this program is stopped in a debugger. An open episode holds up the end of a step for that long.
"""

from common import arguments, job, run
from openai import OpenAI

from bombus import SwarmClient

IDLE_S = 60  # the episode of a program that stands still is given up after it
CALL_S = 30


def main() -> None:
    options = arguments(__doc__ or "")
    with SwarmClient(options.url) as client:
        client.auto_sync_train_config_and_start_engine(job(options.model))
        for _ in range(options.steps):
            episode, credentials = client.begin_episode(discard_episode_timeout=IDLE_S)
            try:
                model = OpenAI(
                    base_url=credentials.base_url, api_key=credentials.api_key, timeout=CALL_S, max_retries=0
                )
                reply = model.chat.completions.create(
                    model=credentials.model,
                    messages=[{"role": "user", "content": "say hello"}],
                    max_tokens=16,
                    logprobs=True,
                )
                choice = reply.choices[0]
                print(f"{episode} at step {client.get_global_step()}: {choice.message.content!r}")
                for token in choice.logprobs.content or [] if choice.logprobs else []:
                    print(f"    {token.logprob:8.3f}  {token.token!r}")
            finally:
                client.abort_episode(episode, detail="only looking")


if __name__ == "__main__":
    run(main)
