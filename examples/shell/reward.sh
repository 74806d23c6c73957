#!/bin/sh
# The reward: the share of digits among the eight characters that the reply may have.
reply=$(sed 's/.*"content": *"\([^"]*\)".*/\1/' answer.json)
digits=$(printf %s "$reply" | tr -cd 0-9 | wc -c)
awk "BEGIN { print $digits / 8 }"
