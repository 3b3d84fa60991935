import type { Clock, Memory, Transport } from "@kv/interface";
import type { NeuronDevice } from "../src/index.js";

export interface VisibleDeviceOptions {
  readonly transport: Transport;
  readonly clock: Pick<Clock, "setTimer">;
  /** Called before each copy. An error that it throws fails the copy. */
  readonly beforeCopy?: (direction: "read" | "write") => void;
  /** Duration of a copy. Default: 1. */
  readonly copyMs?: () => number;
}

/**
 * A device with host memory, so that a test can fill and compare it. Staging reaches it by copies,
 * which take time.
 */
export function visibleDevice(options: VisibleDeviceOptions): NeuronDevice {
  const { transport, clock, beforeCopy = () => {}, copyMs = () => 1 } = options;
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  const memories: Memory[] = [];
  const beginCopy = async (direction: "read" | "write") => {
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
        view: (offsetBytes, viewBytes) => memory.view(offsetBytes, viewBytes),
        async gather(runs) {
          await beginCopy("read");
          return memory.gather(runs);
        },
        async scatter(runs, source) {
          await beginCopy("write");
          return memory.scatter(runs, source);
        },
      };
    },
    async close() {
      for (const memory of memories) memory.close();
    },
  };
}
