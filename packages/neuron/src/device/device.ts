import { KvError, type Memory, takeBuffer } from "@kv/interface";

/**
 * A device whose memory must be copied: neither the CPU nor a network adapter can address it. Its
 * `VRAM` memory has `gather` and `scatter`; `bytes` throws `KV_MEMORY_INVALID`. An engine with its
 * own tensors implements this interface.
 */
export interface NeuronDevice {
  /** For logs and reports: "simulated", "cpu", "libnrt". */
  readonly maker: string;
  /**
   * Allocates zeroed memory, which `close` frees at the latest.
   * @throws `KV_MEMORY_INVALID`, `KV_STAGING_FAILED` from the runtime.
   */
  allocate(lengthBytes: number): Memory;
  readonly counts: DeviceCounts;
  close(): Promise<void>;
}

/** Copies between host and device since the device was created. */
export interface DeviceCounts {
  readonly copies: number;
  readonly bytesRead: number;
  readonly bytesWritten: number;
}

/**
 * Returns the total length of rows `[offsetBytes, lengthBytes]`.
 * @throws `KV_MEMORY_INVALID`, with the row.
 */
function checkRuns(runs: Float64Array, lengthBytes: number): number {
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

interface DeviceCopies {
  read(runs: Float64Array, lengthBytes: number): Promise<ArrayBuffer>;
  write(runs: Float64Array, bytes: ArrayBuffer): Promise<unknown>;
  close(): void;
}

// Device memory is never registered: addresses only identify it.
let nextAddress = 2 ** 40;

export function deviceMemory(
  lengthBytes: number,
  deviceId: number,
  { read, write, close }: DeviceCopies,
): Memory {
  const address = nextAddress;
  nextAddress += Math.ceil(lengthBytes / 4096) * 4096 + 4096;
  const notAddressable = () =>
    new KvError("KV_MEMORY_INVALID", "device memory is not addressable by the process", {
      hint: "use gather and scatter",
    });
  return {
    address,
    lengthBytes,
    memoryType: "VRAM",
    deviceId,
    get bytes(): Uint8Array {
      throw notAddressable();
    },
    view() {
      throw notAddressable();
    },
    gather: async (runs) => read(runs, checkRuns(runs, lengthBytes)),
    async scatter(runs, source) {
      const total = checkRuns(runs, lengthBytes);
      if (total !== source.byteLength) {
        throw new KvError(
          "KV_MEMORY_INVALID",
          `the runs take ${total} bytes, the source has ${source.byteLength}`,
        );
      }
      // Nobody may free the bytes while another thread copies them.
      const bytes = takeBuffer(source);
      await write(runs, bytes);
      return bytes;
    },
    close,
  };
}
