import { KvError, type Memory } from "@kv/interface";

/**
 * A device whose memory neither the CPU nor a network adapter can address, so that it must be
 * copied. Its memory is a `Memory` of type `VRAM`: `gather` reads runs into a host buffer,
 * `scatter` writes a host buffer into runs, and `bytes` throws `KV_MEMORY_INVALID`. An engine with
 * its own tensors implements this interface. The devices of this package also have
 * `Symbol.asyncDispose`.
 */
export interface NeuronDevice {
  /** Name of the implementation for logs and reports: "simulated", "cpu", "libnrt". */
  readonly maker: string;
  /**
   * Allocates zeroed memory on the device. The device frees it at `close` at the latest. Errors:
   * `KV_MEMORY_INVALID`, `KV_STAGING_FAILED` from the runtime.
   */
  allocate(lengthBytes: number): Memory;
  /** Totals of the copies so far. */
  readonly counts: DeviceCounts;
  /** Closes the device and all of its memory. */
  close(): Promise<void>;
}

/** Totals of copies between host and device since the device was created. */
export interface DeviceCounts {
  /** Calls of `gather` and `scatter`. */
  readonly copies: number;
  /** Bytes copied from the device. */
  readonly bytesRead: number;
  /** Bytes copied to the device. */
  readonly bytesWritten: number;
}

/**
 * Checks rows `[offsetBytes, lengthBytes]` of a memory and returns their total length. Errors:
 * `KV_MEMORY_INVALID`, with the row.
 */
export function checkRuns(runs: Float64Array, lengthBytes: number): number {
  if (runs.length % 2 !== 0) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `runs are rows of two numbers; these are ${runs.length} numbers`,
    );
  }
  let total = 0;
  for (let at = 0; at < runs.length; at += 2) {
    const [offset, length] = [runs[at] ?? -1, runs[at + 1] ?? -1];
    const isInteger = Number.isSafeInteger(offset) && Number.isSafeInteger(length);
    if (!isInteger || offset < 0 || length < 0 || offset + length > lengthBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `run ${at / 2} is [${offset}, ${length}], outside a device memory of ${lengthBytes} bytes`,
      );
    }
    total += length;
    if (total > lengthBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `runs 0 to ${at / 2} have ${total} bytes together, and the memory has ${lengthBytes}: some bytes repeat`,
      );
    }
  }
  return total;
}

/** Errors: `KV_MEMORY_INVALID` when the source has another length than the runs. */
export function checkSource(runsLengthBytes: number, source: ArrayBuffer): void {
  if (runsLengthBytes === source.byteLength) return;
  throw new KvError(
    "KV_MEMORY_INVALID",
    `the runs take ${runsLengthBytes} bytes, the source has ${source.byteLength}`,
  );
}

/** The error of `Memory.bytes` on a device. */
export function notAddressable(): KvError {
  return new KvError("KV_MEMORY_INVALID", "device memory is not addressable by the process", {
    hint: "use gather and scatter",
  });
}
