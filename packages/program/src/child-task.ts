import { once } from "node:events";
import { Worker } from "node:worker_threads";
import { KvError } from "@kv/interface";
import type { ChildMessage } from "./child-process.js";

/**
 * Kills this process when its owner has ended. A thread of its own, because the main one may hang
 * in a library.
 */
const WATCH = `const { workerData: owner } = require("node:worker_threads");
setInterval(() => process.ppid === owner || process.kill(process.pid, "SIGKILL"), 500);`;

/**
 * Ends this process when its owner has ended: at once when the channel to it closes, also where it
 * closed before this call, and within a second where the main thread is busy. Does nothing in a
 * process that was started without a channel.
 */
export function endWithOwner(exitCode = 1): void {
  if (process.send === undefined) return;
  // Nobody listened when the channel closed.
  if (!process.connected) process.exit(1);
  process.once("disconnect", () => process.exit(exitCode));
  new Worker(WATCH, { eval: true, execArgv: [], workerData: process.ppid }).unref();
}

/**
 * The whole of a child process: runs a task and answers its owner with the value, or with the error
 * that it threw. Then the channel closes and the process may end. A task that does not return
 * answers with `sendToOwner`; its process ends when the owner closes the channel. The process never
 * outlives its owner.
 */
export async function runTask(task: () => unknown): Promise<void> {
  endWithOwner(0);
  await sendToOwner(await answerOf(task));
  process.removeAllListeners("disconnect");
  if (process.connected) process.disconnect();
}

/** The answer that `task` gives: its value, or the error that it throws. */
export async function answerOf(task: () => unknown): Promise<ChildMessage> {
  try {
    return { value: await task() };
  } catch (thrown) {
    const { code, message, hint } = KvError.from(thrown, "KV_INTERNAL", "the task failed");
    return { error: { code, message, hint } };
  }
}

/** What the owner gave as `request`. */
export async function receiveRequest<T>(): Promise<T> {
  const [request] = await once(process, "message");
  return request as T;
}

/** Sends a message to the owner. Resolves when it was sent, and when there is no owner. */
export function sendToOwner(message: ChildMessage): Promise<void> {
  return new Promise((resolve) => {
    if (process.send === undefined || !process.connected) resolve();
    else process.send(message, undefined, undefined, () => resolve());
  });
}
