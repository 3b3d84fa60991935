import { fork } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { KvError, systemClock } from "@kv/interface";
import type { FaultEngine, FaultFixture } from "@kv/testing/faults/fault-fixture";
import { freePorts } from "@kv/testing/free-ports";
import { bundled } from "@kv/testing/node-programs";
import { createBirpc } from "birpc";
import type { EngineFunctions, EngineProcessOptions, ParentFunctions } from "./engine-process.js";
import { untilNothingHeld } from "./held-resources.js";

const STDERR_KEPT = 4000;

/** Requests that are pending when the process ends reject. */
async function startProcess(
  options: EngineProcessOptions,
  violation: (what: string) => void,
  left: Record<"transfers" | "registrations", number>,
) {
  const { hostName, engineId, tpSize } = options;
  const name = `the process of engine ${engineId} on ${hostName}`;
  let ended = "has ended";
  const dead = () => new KvError("KV_ENGINE_FAILED", `${name} ${ended}`);
  const child = fork(
    await bundled(join(import.meta.dirname, "./engine-process.ts")),
    [JSON.stringify(options)],
    {
      cwd: join(import.meta.dirname, "../../.."),
      // NIXL and UCX log each lost peer: shown only when the process ends unexpectedly.
      stdio: ["ignore", "ignore", "pipe", "ipc"],
    },
  );
  let stderr = "";
  child.stderr?.on("data", (chunk: Buffer) => {
    stderr = (stderr + chunk.toString("latin1")).slice(-STDERR_KEPT);
  });

  const rpc = createBirpc<EngineFunctions, ParentFunctions>(
    { violation },
    {
      post(message) {
        if (!child.connected) throw dead();
        // If the process has just ended, its exit rejects the call.
        child.send(message, () => {});
      },
      on: (receive) => child.on("message", receive),
      timeout: -1,
      deserialize: ({ e: error, ...message }) => ({
        ...message,
        e: error && (error.code ? new KvError(error.code, error.message) : Error(error.message)),
      }),
    },
  );
  let killed = false;
  const exited = once(child, "exit").then(async ([code, signal]) => {
    // Node may tell of the exit before the last message.
    if (child.connected) await once(child, "disconnect");
    if (!killed) ended = `ended with ${code ?? signal}; ${stderr.replaceAll("\n", " | ")}`;
    void rpc.$rejectPendingCalls(({ reject }) => reject(dead()));
    if (!killed && code !== 0) violation(dead().message);
  });

  const engine: FaultEngine = {
    engineId,
    tpSize,
    address: await rpc.address(),
    prefill: rpc.prefill,
    decode: rpc.decode,
    abort: (requestId: string) => void rpc.abort(requestId).catch(() => {}),
    outstanding: rpc.outstanding,
    async kill() {
      killed = true;
      child.kill("SIGKILL");
      await exited;
    },
    async close() {
      const { transfers, registrations } = await rpc.close();
      left.transfers += transfers;
      left.registrations += registrations;
      await exited;
    },
  };
  return { engine, rpc };
}

/** With NIXL over UCX and ZMQ between the engines, and the real clock. */
export function multiProcessFixture({
  faults,
  ...options
}: {
  readonly connector: "pull" | "push";
  readonly seed: string;
  readonly lateMs: number;
  readonly faults: boolean;
}): FaultFixture {
  const clock = systemClock();
  const children: Awaited<ReturnType<typeof startProcess>>[] = [];
  /** An engine starts again at its address, so that its peers notice. */
  const ports = new Map<string, number>();
  const counts: Record<string, number> = {};
  const left = { transfers: 0, registrations: 0 };
  return {
    clock,
    async start({ connector: _, violation, ...order }) {
      const seed = `${options.seed} ${order.hostName} ${children.length}`;
      const sideChannelPort = ports.get(order.hostName) ?? (await freePorts(1))[0] ?? 0;
      const given = { ...options, ...order, seed, sideChannelPort };
      const child = await startProcess(given, violation, left);
      if (!faults) await child.rpc.stopFaults();
      ports.set(order.hostName, sideChannelPort);
      children.push(child);
      return child.engine;
    },
    settle: (work) => work,
    async waitUntilIdle(engines) {
      for (const { engine, rpc } of children) {
        if (!engines.includes(engine)) continue;
        await rpc.stopFaults();
        for (const [kind, count] of Object.entries(await rpc.counts()))
          counts[kind] = (counts[kind] ?? 0) + count;
      }
      await untilNothingHeld(engines, clock);
    },
    countHeld: async () => left,
    faultCounts: () => counts,
  };
}
