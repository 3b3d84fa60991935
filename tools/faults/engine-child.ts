import { fork } from "node:child_process";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import type { FaultEngine } from "@kv/testing/faults/fault-fixture";
import { bundled } from "@kv/testing/node-programs";
import { callsTo } from "./child-calls.js";
import type { EngineFunctions, EngineProcessOptions, Violation } from "./engine-process.js";

/** An engine that runs in its own process. */
export interface EngineChild extends FaultEngine {
  /** How many faults of each kind were injected so far. */
  counts(): Promise<Readonly<Record<string, number>>>;
  /** Injects no faults from now on. */
  stopFaults(): void;
  /** The resources that were still held after the engine had closed; undefined before. */
  heldAfterClose(): Readonly<Record<string, number>> | undefined;
}

const STDERR_KEPT = 4000;

/**
 * Starts the process and waits until its side channel listens. Requests that are still pending
 * reject when the process ends.
 */
export async function startEngineChild(
  options: EngineProcessOptions,
  violation: (what: string) => void,
): Promise<EngineChild> {
  const { hostName, engineId, tpSize } = options;
  const child = fork(
    await bundled(fileURLToPath(new URL("./engine-process.ts", import.meta.url))),
    [JSON.stringify(options)],
    {
      cwd: fileURLToPath(new URL("../..", import.meta.url)),
      // NIXL and UCX log each lost peer to stderr: shown only when the process ends unexpectedly.
      stdio: ["ignore", "ignore", "pipe", "ipc"],
    },
  );
  let stderr = "";
  child.stderr?.on("data", (chunk: Buffer) => {
    stderr = (stderr + chunk.toString("latin1")).slice(-STDERR_KEPT);
  });
  let heldAfterClose: Record<string, number> | undefined;
  let killed = false;
  const exited = new Promise<void>((resolve) => {
    child.once("exit", (code, signal) => {
      if (!killed && code !== 0) {
        const end = `${code ?? signal}; ${stderr.replaceAll("\n", " | ")}`;
        violation(`the process of engine ${engineId} on ${hostName} ended with ${end}`);
      }
      resolve();
    });
  });
  child.on("message", (message: Violation) => {
    if (message.violation !== undefined) violation(message.violation);
  });
  const call = callsTo<EngineFunctions>(
    child,
    () =>
      new KvError("KV_ENGINE_FAILED", `the process of engine ${engineId} on ${hostName} has ended`),
  );
  return {
    engineId,
    tpSize,
    address: await call("address"),
    prefill: (prompt) => call("prefill", prompt),
    decode: (prompt) => call("decode", prompt),
    abort: (requestId) => void call("abort", requestId).catch(() => {}),
    outstanding: () => call("outstanding"),
    counts: () => call("counts"),
    stopFaults: () => void call("stopFaults").catch(() => {}),
    heldAfterClose: () => heldAfterClose,
    async kill() {
      killed = true;
      child.kill("SIGKILL");
      await exited;
    },
    async close() {
      heldAfterClose = await call("close");
      await exited;
    },
  };
}
