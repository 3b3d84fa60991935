import { KvError } from "@kv/interface";
import type { FuzzTarget } from "./target.js";

/** Far more than any input of some KB needs. A busy machine can take the processor away for so long, but not each time. */
const LIMIT_MS = 1000;
const TRIES = 3;

/** Reads an input. Returns what is wrong; undefined where the target returned, or refused the input with a `KvError`, in time. */
export function checkInput(target: FuzzTarget, input: Uint8Array): string | undefined {
  let shortestMs = Number.POSITIVE_INFINITY;
  for (let at = 0; at < TRIES && shortestMs > LIMIT_MS; at += 1) {
    const begun = performance.now();
    try {
      target.read(input);
    } catch (error) {
      if (!KvError.is(error)) return error instanceof Error ? (error.stack ?? error.message) : String(error);
      if (error.message.length > 20_000) return `the error's message has ${error.message.length} characters`;
    }
    shortestMs = Math.min(shortestMs, performance.now() - begun);
  }
  return shortestMs > LIMIT_MS ? `took ${Math.round(shortestMs)} ms for ${input.length} bytes` : undefined;
}
