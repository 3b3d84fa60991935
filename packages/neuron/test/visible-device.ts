import type { Clock, Memory, Transport } from "@kv/interface";
import type { NeuronDevice } from "../src/index.js";

export interface VisibleDeviceOptions {
  readonly transport: Transport;
  readonly clock: Pick<Clock, "setTimer">;
  /** Throws for a copy that is to fail. */
  readonly beforeCopy?: (direction: "read" | "write") => void;
  /** Of a copy; 1 by default. */
  readonly copyMs?: () => number;
}

/** Host memory in the place of a device's, so that a test can fill and compare it; what is not the test goes by copies, which take time. */
export function visibleDevice(options: VisibleDeviceOptions): NeuronDevice {
  const { transport, clock, beforeCopy = () => {}, copyMs = () => 1 } = options;
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  const memories: Memory[] = [];
  const copying = async (direction: "read" | "write") => {
    counts.copies += 1;
    beforeCopy(direction);
    await new Promise<void>((resolve) => void clock.setTimer(resolve, copyMs()));
  };
  return {
    maker: "visible",
    counts,
    allocate(lengthBytes) {
      const memory = transport.allocate(lengthBytes);
      memories.push(memory);
      return {
        ...memory,
        bytes: memory.bytes,
        async gather(runs) {
          await copying("read");
          return memory.gather(runs);
        },
        async scatter(runs, source) {
          await copying("write");
          return memory.scatter(runs, source);
        },
      };
    },
    async close() {
      for (const memory of memories) memory.close();
    },
  };
}
