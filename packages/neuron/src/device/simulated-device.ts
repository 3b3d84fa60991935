import { type Clock, KvError, type Memory, systemClock, takeBuffer } from "@kv/interface";
import { checkRuns, checkSource, type NeuronDevice, notAddressable } from "./device.js";

/** Options of `simulatedDevice`. */
export interface SimulatedDeviceOptions {
  /** Source of time. @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Bandwidth of each direction. @default Infinity */
  readonly bytesPerMs?: number | undefined;
  /** Time before the first byte of a copy. @default 0 */
  readonly latencyMs?: number | undefined;
  /** Called before each copy. An error that it throws fails the copy. @default undefined */
  readonly beforeCopy?: ((direction: "read" | "write", lengthBytes: number) => void) | undefined;
}

/**
 * Creates a simulated device. Its memory is reached by copies only, which take time on a bus with
 * one queue for each direction. It stores the bytes that are written to it and counts copies.
 */
export function simulatedDevice(
  options: SimulatedDeviceOptions = {},
): NeuronDevice & AsyncDisposable {
  const { bytesPerMs = Number.POSITIVE_INFINITY, latencyMs = 0, beforeCopy } = options;
  const clock = options.clock ?? systemClock();
  const memories = new Set<Memory>();
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  const busyUntilMs = { read: 0, write: 0 };
  let nextAddress = 2 ** 40;

  /**
   * Resolves when the bus has moved this many bytes and those of all earlier copies in this
   * direction.
   */
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
      const address = nextAddress;
      nextAddress += Math.ceil(lengthBytes / 4096) * 4096 + 4096;
      const open = (): Uint8Array => {
        if (data !== undefined) return data;
        throw new KvError(
          "KV_MEMORY_INVALID",
          `device memory at 0x${address.toString(16)} is closed`,
        );
      };
      const memory: Memory = {
        address,
        lengthBytes,
        memoryType: "VRAM",
        deviceId: 0,
        get bytes(): Uint8Array {
          throw notAddressable();
        },
        view() {
          throw notAddressable();
        },
        async gather(runs) {
          const out = new Uint8Array(checkRuns(runs, lengthBytes));
          open();
          await bus("read", out.byteLength);
          const source = open();
          let at = 0;
          for (let row = 0; row < runs.length; row += 2) {
            const [offset = 0, length = 0] = [runs[row], runs[row + 1]];
            out.set(source.subarray(offset, offset + length), at);
            at += length;
          }
          counts.bytesRead += out.byteLength;
          return out.buffer;
        },
        async scatter(runs, source) {
          const total = checkRuns(runs, lengthBytes);
          checkSource(total, source);
          open();
          const bytes = new Uint8Array(takeBuffer(source));
          await bus("write", total);
          const target = open();
          let at = 0;
          for (let row = 0; row < runs.length; row += 2) {
            const [offset = 0, length = 0] = [runs[row], runs[row + 1]];
            target.set(bytes.subarray(at, at + length), offset);
            at += length;
          }
          counts.bytesWritten += total;
          return bytes.buffer;
        },
        close() {
          data = undefined;
          memories.delete(memory);
        },
      };
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

/**
 * Creates a device whose memory is host memory, under the same rules. Its copies take no simulated
 * time.
 */
export function cpuDevice(): NeuronDevice & AsyncDisposable {
  return { ...simulatedDevice(), maker: "cpu" };
}
