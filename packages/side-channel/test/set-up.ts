import type { KvError } from "@kv/interface";
import { zmqSideChannel } from "../src/zmq-side-channel.js";

export const host = "127.0.0.1";

/** The greeting of a peer without CURVE. */
export const GREETING = Buffer.from(`ff00000000000000017f03014e554c4c${"00".repeat(48)}`, "hex");

/** What a test has opened. Each file closes it by `afterEach(closeAll)`. */
export const closers: (() => unknown)[] = [];

export async function closeAll(): Promise<void> {
  for (const close of closers.splice(0).reverse()) await close();
}

export function channel(options: Parameters<typeof zmqSideChannel>[0] = {}) {
  const made = zmqSideChannel(options);
  closers.push(() => made.close());
  return made;
}

/** The error that a promise rejects with. */
export const failure = (promise: Promise<unknown>): Promise<KvError> =>
  promise.then(
    () => {
      throw new Error("it did not fail");
    },
    (error: KvError) => error,
  );

/** Resolves when the predicate holds. Checks it on each turn of the event loop. */
export async function until(holds: () => boolean): Promise<void> {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve));
}
