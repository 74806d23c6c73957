#!/bin/sh
# An agent in a few lines of shell: it asks its model once, and leaves the reply in answer.json.
body=$(python3 -c 'import json, os
messages = [{"role": "user", "content": os.environ["BOMBUS_PROMPT"]}]
print(json.dumps({"model": os.environ["BOMBUS_MODEL"], "messages": messages, "max_tokens": 8}))')
curl --silent --show-error --fail-with-body --retry 5 "$BOMBUS_BASE_URL/chat/completions" -o answer.json \
    -H "Authorization: Bearer $BOMBUS_API_KEY" -H 'Content-Type: application/json' -d "$body" || {
    cat answer.json
    exit 1
}
