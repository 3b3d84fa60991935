import { KvError } from "@kv/interface";
import type { FuzzTarget } from "./target.js";

/** Processor time, far more than any input of some KB needs. */
const LIMIT_MS = 1000;

/**
 * Reads an input. Returns what is wrong; undefined where the target returned, or refused the input
 * with a `KvError`, in time.
 */
export function checkInput(target: FuzzTarget, input: Uint8Array): string | undefined {
  const begun = process.cpuUsage();
  try {
    target.read(input);
  } catch (error) {
    if (!KvError.is(error))
      return error instanceof Error ? (error.stack ?? error.message) : String(error);
    if (error.message.length > 20_000)
      return `the error's message has ${error.message.length} characters`;
  }
  const { user, system } = process.cpuUsage(begun);
  const tookMs = (user + system) / 1000;
  return tookMs > LIMIT_MS ? `took ${Math.round(tookMs)} ms for ${input.length} bytes` : undefined;
}
