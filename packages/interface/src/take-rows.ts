import { KvError } from "./errors.js";

/**
 * The numbers of `rows` in a buffer that nobody else has: for a transport that is given a table with `takeRows`. Their own buffer is
 * detached, and nothing is copied. Errors: `KV_LIST_INVALID` where it cannot be, as a `SharedArrayBuffer` and WebAssembly's memory.
 */
export function takeRows(rows: Float64Array): Float64Array {
  try {
    return structuredClone(rows, { transfer: [rows.buffer as ArrayBuffer] });
  } catch (cause) {
    throw new KvError("KV_LIST_INVALID", "rows are to be taken over, and their buffer cannot be detached", {
      hint: "give a Float64Array with a buffer of its own, or leave takeRows out",
      cause,
    });
  }
}
