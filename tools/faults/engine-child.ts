import { fork } from "node:child_process";
import { fileURLToPath } from "node:url";
import { KvError, type KvErrorCode } from "@kv/interface";
import type { FaultEngine } from "@kv/testing/faults/fault-fixture";
import { bundled } from "@kv/testing/node-programs";
import type { EngineCommand, EngineMessage, EngineProcessOptions } from "./engine-messages.js";

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

interface PendingRequest {
  resolve(value: never): void;
  reject(error: Error): void;
}

/** Starts the process and waits until its side channel listens. Requests that are still pending reject when the process ends. */
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
  const pending = new Map<number, PendingRequest>();
  let number = 0;
  let heldAfterClose: Record<string, number> | undefined;
  let killed = false;
  const dead = () =>
    new KvError("KV_ENGINE_FAILED", `the process of engine ${engineId} on ${hostName} has ended`);
  const exited = new Promise<void>((resolve) => {
    child.once("exit", (code, signal) => {
      if (!killed && code !== 0) {
        const end = `${code ?? signal}; ${stderr.replaceAll("\n", " | ")}`;
        violation(`the process of engine ${engineId} on ${hostName} ended with ${end}`);
      }
      for (const { reject } of pending.values()) reject(dead());
      pending.clear();
      resolve();
    });
  });

  const address = await new Promise<{ host: string; port: number }>((resolve, reject) => {
    child.on("message", (message: EngineMessage) => {
      if (message.kind === "ready") resolve(message.address);
      else if (message.kind === "violation") violation(message.what);
      else {
        const { resolve: answer, reject: fail } = pending.get(message.number) ?? {};
        pending.delete(message.number);
        if (message.kind === "answer") answer?.(message.value as never);
        else if (message.code === undefined) fail?.(new Error(message.message));
        else fail?.(new KvError(message.code as KvErrorCode, message.message));
      }
    });
    void exited.then(() => reject(dead()));
  });

  function send(command: Omit<EngineCommand, "number">): void {
    if (!child.connected) return;
    child.send({ number: 0, ...command }, () => {});
  }
  function request<T>(name: EngineCommand["name"], argument?: unknown): Promise<T> {
    if (!child.connected) return Promise.reject(dead());
    number += 1;
    const command: EngineCommand = { number, name, argument };
    return new Promise((resolve, reject) => {
      pending.set(number, { resolve, reject });
      // If the process has just ended, its exit handler rejects pending requests.
      child.send(command, () => {});
    });
  }

  return {
    engineId,
    tpSize,
    address,
    prefill: (prompt) => request("prefill", prompt),
    decode: (prompt) => request("decode", prompt),
    abort: (requestId) => send({ name: "abort", argument: requestId }),
    outstanding: () => request("outstanding"),
    counts: () => request("counts"),
    stopFaults: () => send({ name: "stopFaults" }),
    heldAfterClose: () => heldAfterClose,
    async kill() {
      killed = true;
      child.kill("SIGKILL");
      await exited;
    },
    async close() {
      heldAfterClose = await request<Record<string, number>>("close");
      await exited;
    },
  };
}
