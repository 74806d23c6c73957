#!/bin/sh
# Usage: reward.sh ANSWER. The reward is 1 if the command has printed the answer, and 0 otherwise.
printf '%s\n' "$1" | cmp -s - answer.txt
