#!/bin/sh
# The reward is 1 for a reply of three words, and less for each word too few or too many. What Claude Code says of itself
# is in brackets at the beginning of a line.
grep -v '^\[claude-code:' "$BOMBUS_OUTPUT" | wc -w | awk '{ print 1 / (1 + ($1 > 3 ? $1 - 3 : 3 - $1)) }'
