#!/usr/bin/env bash
# Runs a command in its own process group and ends the whole group when standard input closes. Standard input closes when the test process ends,
# for whatever reason. usage: guard.sh COMMAND [ARGUMENTS…]
set -uo pipefail
# vLLM often waits for the process that runs the test. On two cores its polling must not take the CPU from that process.
setsid bash -c 'echo 10 2>/dev/null >/proc/self/autogroup; exec nice -n 10 "$@"' _ "$@" </dev/null &
group=$!
(
  # `read` returns when the other end of the pipe is closed.
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
# Ends workers that outlive their leader.
kill -KILL -- "-$group" 2>/dev/null
kill "$keeper" 2>/dev/null
exit "$code"
