import { type Clock, KvError, type Memory, systemClock } from "@kv/interface";
import { checkRuns, checkSource, type NeuronDevice, notAddressable } from "./device.js";

export interface SimulatedDeviceOptions {
  readonly clock?: Clock;
  /** Of each direction; infinity by default. */
  readonly bytesPerMs?: number;
  /** Before the first byte of a copy; 0 by default. */
  readonly latencyMs?: number;
  /** Called before a copy: what it throws is the copy's failure. */
  readonly beforeCopy?: (direction: "read" | "write", lengthBytes: number) => void;
}

/**
 * A device of its own: its memory can be reached by copies only, which take their time on a bus with a queue for each direction. It keeps
 * order, counts, and holds what a real one would hold.
 */
export function simulatedDevice(options: SimulatedDeviceOptions = {}): NeuronDevice {
  const { bytesPerMs = Number.POSITIVE_INFINITY, latencyMs = 0, beforeCopy } = options;
  const clock = options.clock ?? systemClock();
  const memories = new Set<Memory>();
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  const busyUntilMs = { read: 0, write: 0 };
  let nextAddress = 2 ** 40;

  /** Resolves when the bus has moved so many bytes, those that were asked for before included. */
  async function bus(direction: "read" | "write", lengthBytes: number): Promise<void> {
    counts.copies += 1;
    beforeCopy?.(direction, lengthBytes);
    const nowMs = clock.now();
    const endMs = Math.max(nowMs, busyUntilMs[direction]) + latencyMs + lengthBytes / bytesPerMs;
    busyUntilMs[direction] = endMs;
    if (endMs > nowMs) {
      await new Promise<void>((resolve) => void clock.setTimer(resolve, endMs - nowMs, { ref: true }));
    }
  }

  return {
    maker: "simulated",
    counts,
    allocate(lengthBytes) {
      let data: Uint8Array | undefined = new Uint8Array(lengthBytes);
      const address = nextAddress;
      nextAddress += Math.ceil(lengthBytes / 4096) * 4096 + 4096;
      const open = (): Uint8Array => {
        if (data !== undefined) return data;
        throw new KvError("KV_MEMORY_INVALID", `device memory at 0x${address.toString(16)} is closed`);
      };
      const memory: Memory = {
        address,
        lengthBytes,
        memoryType: "VRAM",
        deviceId: 0,
        get bytes(): Uint8Array {
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
          await bus("write", total);
          const target = open();
          const bytes = new Uint8Array(source);
          let at = 0;
          for (let row = 0; row < runs.length; row += 2) {
            const [offset = 0, length = 0] = [runs[row], runs[row + 1]];
            target.set(bytes.subarray(at, at + length), offset);
            at += length;
          }
          counts.bytesWritten += total;
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
  };
}

/** Host memory in the place of a device's: the same rules, no time. */
export function cpuDevice(): NeuronDevice {
  return { ...simulatedDevice(), maker: "cpu" };
}
