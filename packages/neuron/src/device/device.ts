import { KvError, type Memory } from "@kv/interface";

/**
 * A device whose memory is out of the reach of loads and stores and of a NIC: it is copied from and to. `Memory` it is all the same, of type
 * `VRAM`: `gather` reads runs of it into a host buffer, `scatter` writes a host buffer into runs, `bytes` is refused.
 */
export interface NeuronDevice {
  /** For logs and reports: "simulated", "cpu", "libnrt". */
  readonly maker: string;
  /** Zeroed. Errors: `KV_MEMORY_INVALID`; `KV_STAGING_FAILED` from the runtime. */
  allocate(lengthBytes: number): Memory;
  readonly counts: DeviceCounts;
  /** Closes the memories too. */
  close(): Promise<void>;
}

/** Copies over the device's bus since it was made. */
export interface DeviceCounts {
  readonly copies: number;
  readonly bytesRead: number;
  readonly bytesWritten: number;
}

/** Rows `[offsetBytes, lengthBytes]` within a memory; answers their sum. Errors: `KV_MEMORY_INVALID`, naming the row. */
export function checkRuns(runs: Float64Array, lengthBytes: number): number {
  if (runs.length % 2 !== 0) {
    throw new KvError("KV_MEMORY_INVALID", `runs are rows of two numbers; these are ${runs.length} numbers`);
  }
  let total = 0;
  for (let at = 0; at < runs.length; at += 2) {
    const [offset, length] = [runs[at] ?? -1, runs[at + 1] ?? -1];
    const whole = Number.isSafeInteger(offset) && Number.isSafeInteger(length);
    if (!whole || offset < 0 || length < 0 || offset + length > lengthBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `run ${at / 2} is [${offset}, ${length}], outside a device memory of ${lengthBytes} bytes`,
      );
    }
    total += length;
  }
  return total;
}

export function checkSource(runsLengthBytes: number, source: ArrayBuffer): void {
  if (runsLengthBytes === source.byteLength) return;
  throw new KvError(
    "KV_MEMORY_INVALID",
    `the runs take ${runsLengthBytes} bytes, the source has ${source.byteLength}`,
  );
}

export function notAddressable(): KvError {
  return new KvError("KV_MEMORY_INVALID", "device memory is not addressable by the process", {
    hint: "use gather and scatter",
  });
}
