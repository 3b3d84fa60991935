#!/usr/bin/env bash
# Runs a command in a process group of its own, and ends the whole group when standard input closes: a test that dies, however it dies,
# closes it. usage: guard.sh COMMAND [ARGUMENTS…]
set -uo pipefail
# What vLLM waits for is often the process that runs the test: on two cores its polling must not keep that one waiting.
setsid bash -c 'echo 10 2>/dev/null >/proc/self/autogroup; exec nice -n 10 "$@"' _ "$@" </dev/null &
group=$!
(
  # `read` returns when the other end of the pipe has gone.
  read -r _
  kill -TERM -- "-$group" 2>/dev/null
  for _ in $(seq 40); do
    kill -0 -- "-$group" 2>/dev/null || exit 0
    sleep 0.25
  done
  kill -KILL -- "-$group" 2>/dev/null
) <&0 &
keeper=$!
wait "$group"
code=$?
# Workers that outlive their leader go with it.
kill -KILL -- "-$group" 2>/dev/null
kill "$keeper" 2>/dev/null
exit "$code"
