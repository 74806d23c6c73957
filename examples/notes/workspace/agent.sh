#!/bin/sh
# A small agent: it asks its model for a command, runs it in its folder, and leaves what it prints in answer.txt.
# It runs two commands that only read, and nothing else: a model in training says all kinds of things.
export LC_ALL=C

message() { # ROLE TEXT
    printf '{"role": "%s", "content": "%s"}' "$1" "$2"
}

messages="$(message system 'Reply with a command that prints the answer.'), \
$(message user 'Print the first line of plants.txt.'), $(message assistant 'head -n 1 plants.txt'), \
$(message user 'Print the last line of plants.txt.'), $(message assistant 'tail -n 1 plants.txt'), \
$(message user "$BOMBUS_PROMPT")"
curl --silent --show-error --fail-with-body --retry 5 "$BOMBUS_BASE_URL/chat/completions" -o reply.json \
    -H "Authorization: Bearer $BOMBUS_API_KEY" -H 'Content-Type: application/json' \
    -d "{\"model\": \"$BOMBUS_MODEL\", \"messages\": [$messages]}" || {
    cat reply.json
    exit 1
}
command=$(sed -nE 's/.*"content": *"(([^"\\]|\\.)*)".*/\1/p' reply.json) # with the escapes of JSON
echo "$command"
case $command in
*[!a-z0-9\ .-]*) echo 'It has something else in it than names and options.' ;;
'head -n 1 '* | 'tail -n 1 '*) timeout 5 $command | head -c 200 >answer.txt ;;
*) echo 'There is no such command.' ;;
esac
