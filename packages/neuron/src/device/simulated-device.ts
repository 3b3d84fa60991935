import { type Clock, KvError, type Memory, systemClock } from "@kv/interface";
import { deviceMemory, type NeuronDevice } from "./device.js";

/** Options of `simulatedDevice`. */
export interface SimulatedDeviceOptions {
  /** @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Bandwidth of each direction. @default Infinity */
  readonly bytesPerMs?: number | undefined;
  /** Delay of a copy's first byte. @default 0 */
  readonly latencyMs?: number | undefined;
  /** Called before each copy; its error fails the copy. */
  readonly beforeCopy?: ((direction: "read" | "write", lengthBytes: number) => void) | undefined;
}

/**
 * Creates a simulated device. Copies take time on a bus with one queue per direction, and are
 * counted.
 */
export function simulatedDevice(
  options: SimulatedDeviceOptions = {},
): NeuronDevice & AsyncDisposable {
  const { bytesPerMs = Number.POSITIVE_INFINITY, latencyMs = 0, beforeCopy } = options;
  const clock = options.clock ?? systemClock();
  const memories = new Set<Memory>();
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  const busyUntilMs = { read: 0, write: 0 };

  /** Waits for earlier copies in this direction, too. */
  async function bus(direction: "read" | "write", lengthBytes: number): Promise<void> {
    counts.copies += 1;
    beforeCopy?.(direction, lengthBytes);
    const nowMs = clock.now();
    const endMs = Math.max(nowMs, busyUntilMs[direction]) + latencyMs + lengthBytes / bytesPerMs;
    busyUntilMs[direction] = endMs;
    if (endMs > nowMs) {
      await new Promise<void>(
        (resolve) => void clock.setTimer(resolve, endMs - nowMs, { ref: true }),
      );
    }
  }

  const device: NeuronDevice & AsyncDisposable = {
    maker: "simulated",
    counts,
    allocate(lengthBytes) {
      let data: Uint8Array | undefined = new Uint8Array(lengthBytes);
      const open = (): Uint8Array => {
        if (data !== undefined) return data;
        throw new KvError(
          "KV_MEMORY_INVALID",
          `device memory at 0x${memory.address.toString(16)} is closed`,
        );
      };
      const memory = deviceMemory(lengthBytes, 0, {
        async read(runs, total) {
          const out = new Uint8Array(total);
          open();
          await bus("read", total);
          const source = open();
          for (const [at, offset, length] of eachRun(runs))
            out.set(source.subarray(offset, offset + length), at);
          counts.bytesRead += total;
          return out.buffer;
        },
        async write(runs, buffer) {
          open();
          const bytes = new Uint8Array(buffer);
          await bus("write", bytes.byteLength);
          const target = open();
          for (const [at, offset, length] of eachRun(runs))
            target.set(bytes.subarray(at, at + length), offset);
          counts.bytesWritten += bytes.byteLength;
        },
        close() {
          data = undefined;
          memories.delete(memory);
        },
      });
      memories.add(memory);
      return memory;
    },
    async close() {
      for (const memory of memories) memory.close();
    },
    [Symbol.asyncDispose]: () => device.close(),
  };
  return device;
}

function* eachRun(runs: Float64Array): Iterable<[at: number, offset: number, length: number]> {
  let at = 0;
  for (let row = 0; row < runs.length; row += 2) {
    const [offset = 0, length = 0] = [runs[row], runs[row + 1]];
    yield [at, offset, length];
    at += length;
  }
}

/** Creates a device of host memory under the same rules. Copies take no simulated time. */
export function cpuDevice(): NeuronDevice & AsyncDisposable {
  return { ...simulatedDevice(), maker: "cpu" };
}
