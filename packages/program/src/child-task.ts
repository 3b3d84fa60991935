import { once } from "node:events";
import { Worker } from "node:worker_threads";
import { KvError } from "@kv/interface";
import type { ChildMessage } from "./child-process.js";

/** In a thread, because a library may hang the main one. */
const WATCH = `const { workerData: owner } = require("node:worker_threads");
setInterval(() => process.ppid === owner || process.kill(process.pid, "SIGKILL"), 500);`;

/**
 * Ends this process with its owner: when the channel closes, or within a second if the main thread
 * is busy. No effect without a channel.
 */
export function endWithOwner(exitCode = 1): void {
  if (process.send === undefined) return;
  if (!process.connected) process.exit(1);
  process.once("disconnect", () => process.exit(exitCode));
  new Worker(WATCH, { eval: true, execArgv: [], workerData: process.ppid }).unref();
}

/**
 * Answers the owner with a task's value or error, then closes the channel. A task that never
 * returns answers with `sendToOwner`.
 */
export async function runTask(task: () => unknown): Promise<void> {
  endWithOwner(0);
  await sendToOwner(await answerOf(task));
  process.removeAllListeners("disconnect");
  if (process.connected) process.disconnect();
}

/** A task's value or error as an answer. */
export async function answerOf(task: () => unknown): Promise<ChildMessage> {
  try {
    return { value: await task() };
  } catch (thrown) {
    const { code, message, hint } = KvError.from(thrown, "KV_INTERNAL", "the task failed");
    return { error: { code, message, hint } };
  }
}

/** The owner's `request`. */
export async function receiveRequest<T>(): Promise<T> {
  const [request] = await once(process, "message");
  return request as T;
}

/** Resolves when the message was sent, or without an owner. */
export function sendToOwner(message: ChildMessage): Promise<void> {
  return new Promise((resolve) => {
    if (process.send === undefined || !process.connected) resolve();
    else process.send(message, undefined, undefined, () => resolve());
  });
}
