"""Look at a model's replies without training it: every episode is aborted, so none of them reaches a batch.

It can run beside other clients of the same engine without affecting their training.
"""

from common import arguments, job, run
from openai import OpenAI

from bombus import SwarmClient


def main() -> None:
    options = arguments(__doc__ or "")
    with SwarmClient(options.url) as client:
        client.auto_sync_train_config_and_start_engine(job(options.model))
        for _ in range(options.steps):
            episode, credentials = client.begin_episode(discard_episode_timeout=60)
            try:
                model = OpenAI(base_url=credentials.base_url, api_key=credentials.api_key)
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
