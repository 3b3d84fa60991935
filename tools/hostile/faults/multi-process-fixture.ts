import { fork } from "node:child_process";
import { fileURLToPath } from "node:url";
import { KvError, systemClock } from "@kv/interface";
import type { FaultEngine, FaultFixture } from "@kv/testing/faults/fault-fixture";
import { bundled } from "@kv/testing/node-programs";
import { createBirpc } from "birpc";
import type { EngineFunctions, EngineProcessOptions, ParentFunctions } from "./engine-process.js";
import { untilNothingHeld } from "./held-resources.js";

const STDERR_KEPT = 4000;

/** An engine that runs in its own process. */
interface EngineChild extends FaultEngine {
  counts(): Promise<Readonly<Record<string, number>>>;
  stopFaults(): Promise<void>;
  /** What was still held after the engine had closed. */
  readonly left: { transfers: number; registrations: number };
}

/** Requests that are pending when the process ends reject. */
async function startChild(
  options: EngineProcessOptions,
  violation: (what: string) => void,
): Promise<EngineChild> {
  const { hostName, engineId, tpSize } = options;
  const child = fork(
    await bundled(fileURLToPath(new URL("./engine-process.ts", import.meta.url))),
    [JSON.stringify(options)],
    {
      cwd: fileURLToPath(new URL("../../..", import.meta.url)),
      // NIXL and UCX log each lost peer to stderr: shown only when the process ends unexpectedly.
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
      post: (message) => child.send(message, () => {}),
      on: (receive) => child.on("message", receive),
      timeout: -1,
      deserialize: ({ e: error, ...message }) => ({
        ...message,
        e:
          error && (error.code ? new KvError(error.code, error.message) : new Error(error.message)),
      }),
    },
  );
  const name = `the process of engine ${engineId} on ${hostName}`;
  const dead = () => new KvError("KV_ENGINE_FAILED", `${name} has ended`);
  let killed = false;
  const exited = new Promise<void>((resolve) => {
    child.once("exit", (code, signal) => {
      rpc.$close(dead());
      if (!killed && code !== 0)
        violation(`${name} ended with ${code ?? signal}; ${stderr.replaceAll("\n", " | ")}`);
      resolve();
    });
  });
  const living = <T>(call: () => Promise<T>) => (rpc.$closed ? Promise.reject(dead()) : call());

  const left = { transfers: 0, registrations: 0 };
  return {
    engineId,
    tpSize,
    address: await rpc.address(),
    prefill: (prompt) => living(() => rpc.prefill(prompt)),
    decode: (prompt) => living(() => rpc.decode(prompt)),
    abort: (requestId) => void rpc.abort.asEvent(requestId).catch(() => {}),
    outstanding: () => living(rpc.outstanding),
    counts: () => living(rpc.counts),
    stopFaults: () => living(rpc.stopFaults),
    left,
    async kill() {
      killed = true;
      child.kill("SIGKILL");
      await exited;
    },
    async close() {
      Object.assign(left, await living(rpc.close));
      await exited;
    },
  };
}

/**
 * Runs each engine in its own process, with NIXL over UCX and ZMQ between them, with the real
 * clock. Engines are killed with SIGKILL.
 */
export function multiProcessFixture(options: {
  readonly connector: "pull" | "push";
  readonly seed: string;
  readonly lateMs: number;
  /** Whether operations fail, besides the deaths of engines. @default true */
  readonly faults?: boolean;
}): FaultFixture {
  const { connector, lateMs, faults = true } = options;
  const clock = systemClock();
  const children: EngineChild[] = [];
  /** A restarted engine listens on its predecessor's port, so that peers notice the restart. */
  const ports = new Map<string, number>();
  const counts: Record<string, number> = {};
  return {
    clock,
    async start({ connector: _, violation, ...order }) {
      const seed = `${options.seed} ${order.hostName} ${children.length}`;
      const sideChannelPort = ports.get(order.hostName) ?? 0;
      const given = { ...order, connector, seed, sideChannelPort, lateMs };
      const child = await startChild(given, violation);
      if (!faults) await child.stopFaults();
      ports.set(order.hostName, child.address.port);
      children.push(child);
      return child;
    },
    settle: (work) => work,
    async waitUntilIdle(engines) {
      for (const child of children.filter((each) => engines.includes(each))) {
        await child.stopFaults();
        for (const [kind, count] of Object.entries(await child.counts()))
          counts[kind] = (counts[kind] ?? 0) + count;
      }
      await untilNothingHeld(engines, clock);
    },
    async countHeld() {
      const sum = (what: keyof EngineChild["left"]) =>
        children.reduce((total, { left }) => total + left[what], 0);
      return { transfers: sum("transfers"), registrations: sum("registrations") };
    },
    faultCounts: () => counts,
  };
}
