"""A small agent for tests: it asks its model so many times, and writes what it said to `answer.txt`.

It uses the standard library alone, so that it starts quickly.
"""

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["BOMBUS_MODEL"], "messages": messages, "max_tokens": 8}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        body,
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        content: str = json.load(reply)["choices"][0]["message"]["content"]
    return content


def main(prompt: str, calls: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    for _ in range(int(calls)):
        messages.append({"role": "assistant", "content": ask(messages)})
        print(messages[-1]["content"], flush=True)
        messages.append({"role": "user", "content": "and then"})
    with open("answer.txt", "w") as answer:
        answer.write(messages[-2]["content"])


if __name__ == "__main__":
    main(*sys.argv[1:])
