// A long suite: compiles the units of the addon for tests of their own.
import { execFile } from "node:child_process";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished, test } from "vitest";

const run = promisify(execFile);
const native = fileURLToPath(new URL("../../../../native/", import.meta.url));

// Each program exits with the number of failed expectations and prints them to stderr.
const UNITS: readonly {
  readonly name: string;
  readonly units: readonly string[];
  readonly args?: string[];
}[] = [
  {
    name: "PollBackoff: an idle agent's thread sleeps, and does not pause while a peer's data arrives",
    units: ["test/poll_backoff_test.cc"],
  },
  {
    name: "AgentTurn: the JavaScript thread calls NIXL while the agent's thread sleeps, and rests after a long call",
    units: ["test/agent_turn_test.cc"],
  },
  {
    name: "CommandQueue: the agent's thread sleeps until a wake-up is due, neither longer nor shorter",
    units: ["test/command_queue_test.cc"],
  },
  {
    name: "TransferScheduler: transfers take turns, and those that wait cost nothing",
    units: ["test/transfer_scheduler_test.cc"],
  },
  {
    name: "PeerLiveness: hosts that vanish do not block, and connections are made at the same time",
    units: ["test/peer_liveness_test.cc"],
  },
  {
    name: "accept_or_refuse: no error of one connection or one moment ends a listener of UCX",
    units: ["test/descriptors_test.cc", "src/library/descriptors.cc"],
  },
  {
    name: "drop_lost_answers: an answer to a peer that has died is dropped, and other messages have their errors",
    units: ["test/lost_answers_test.cc", "src/repairs/lost_answers.cc"],
  },
  {
    name: "drop_lost_answers: a UCX that is not as expected stays as it is, and the agent hears of it",
    units: ["test/lost_answers_test.cc", "src/repairs/lost_answers.cc"],
    args: ["unknown"],
  },
  {
    name: "MonotonicCondition: a clock that is set back does not prolong a wait",
    units: ["test/monotonic_condition_test.cc"],
  },
];

test.each(UNITS.map((unit) => [unit.name, unit] as const))(
  "%s",
  { timeout: 60_000 },
  async (_, unit) => {
    const { units, args = [] } = unit;
    const program = join(scratchFolder(onTestFinished), "program");
    const includes = ["test/stubs", "src"].map((path) => `-I${join(native, path)}`);
    const sources = units.map((file) => join(native, file));
    await run(process.env["CXX"] ?? "c++", [
      "-std=c++20",
      "-O1",
      ...includes,
      ...sources,
      "-o",
      program,
    ]);
    // A program that hangs is killed.
    await expect(
      run(program, args, { timeout: 20_000, killSignal: "SIGKILL" }),
    ).resolves.toBeDefined();
  },
);
