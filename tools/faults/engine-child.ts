import { fork } from "node:child_process";
import { fileURLToPath } from "node:url";
import { KvError, type KvErrorCode } from "@kv/interface";
import type { FaultEngine } from "@kv/testing/faults/fault-fixture";
import type { EngineProcessOrder, EngineQuestion, EngineSaying } from "./engine-messages.js";

/** An engine in a process of its own. */
export interface EngineChild extends FaultEngine {
  /** What its strain did so far. */
  counts(): Promise<Readonly<Record<string, number>>>;
  /** Nothing goes wrong in it any more by itself. */
  calm(): void;
  /** What was held when it had closed everything; undefined as long as it has not. */
  left(): Readonly<Record<string, number>> | undefined;
}

const STDERR_KEPT = 4000;

interface Waiting {
  resolve(value: never): void;
  reject(error: Error): void;
}

/** Starts it, and waits until its side channel listens. What it never answers ends when the process does. */
export async function startEngineChild(
  order: EngineProcessOrder,
  violation: (what: string) => void,
): Promise<EngineChild> {
  const { hostName, engineId, tpSize } = order;
  const child = fork(
    fileURLToPath(new URL("./engine-process.ts", import.meta.url)),
    [JSON.stringify(order)],
    {
      cwd: fileURLToPath(new URL("../..", import.meta.url)),
      execArgv: ["--import", "tsx"],
      // NIXL and UCX tell of each peer that is gone: shown where the process ends as it should not.
      stdio: ["ignore", "ignore", "pipe", "ipc"],
    },
  );
  let stderr = "";
  child.stderr?.on("data", (chunk: Buffer) => {
    stderr = (stderr + chunk.toString("latin1")).slice(-STDERR_KEPT);
  });
  const waiting = new Map<number, Waiting>();
  let number = 0;
  let left: Record<string, number> | undefined;
  let killed = false;
  const dead = () =>
    new KvError("KV_ENGINE_FAILED", `the process of engine ${engineId} on ${hostName} has ended`);
  const exited = new Promise<void>((resolve) => {
    child.once("exit", (code, signal) => {
      if (!killed && code !== 0) {
        const end = `${code ?? signal}; ${stderr.replaceAll("\n", " | ")}`;
        violation(`the process of engine ${engineId} on ${hostName} ended with ${end}`);
      }
      for (const { reject } of waiting.values()) reject(dead());
      waiting.clear();
      resolve();
    });
  });

  const address = await new Promise<{ host: string; port: number }>((resolve, reject) => {
    child.on("message", (saying: EngineSaying) => {
      if (saying.says === "ready") resolve(saying.address);
      else if (saying.says === "violation") violation(saying.what);
      else {
        const { resolve: answer, reject: fail } = waiting.get(saying.number) ?? {};
        waiting.delete(saying.number);
        if (saying.says === "answer") answer?.(saying.value as never);
        else if (saying.code === undefined) fail?.(new Error(saying.message));
        else fail?.(new KvError(saying.code as KvErrorCode, saying.message));
      }
    });
    void exited.then(() => reject(dead()));
  });

  function tell(question: Omit<EngineQuestion, "number">): void {
    if (!child.connected) return;
    child.send({ number: 0, ...question }, () => {});
  }
  function ask<T>(what: EngineQuestion["ask"], about?: unknown): Promise<T> {
    if (!child.connected) return Promise.reject(dead());
    number += 1;
    const question: EngineQuestion = { number, ask: what, about };
    return new Promise((resolve, reject) => {
      waiting.set(question.number, { resolve, reject });
      // A process that has just ended: its exit tells all who wait.
      child.send(question, () => {});
    });
  }

  return {
    engineId,
    tpSize,
    address,
    prefill: (request) => ask("prefill", request),
    decode: (request) => ask("decode", request),
    abort: (requestId) => tell({ ask: "abort", about: requestId }),
    outstanding: () => ask("outstanding"),
    counts: () => ask("counts"),
    calm: () => tell({ ask: "calm" }),
    left: () => left,
    async kill() {
      killed = true;
      child.kill("SIGKILL");
      await exited;
    },
    async close() {
      left = await ask<Record<string, number>>("close");
      await exited;
    },
  };
}
