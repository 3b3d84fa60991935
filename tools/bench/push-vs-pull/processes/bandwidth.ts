import { inOrder, lists, openPair, shuffled } from "../../nixl/fixture.js";
import { median } from "../../report.js";
import { BLOCK_BYTES } from "../workload.js";

/**
 * Measures how long one transfer takes between two processes on this machine, in ms, with the
 * caches' block size.
 */
export interface Bandwidth {
  transferMs(lengthBytes: number, order: "contiguous" | "fragmented"): Promise<number>;
  close(): Promise<void>;
}

const LENGTH_BYTES = 32 * 2 ** 20;
const ROUNDS = 7;

export async function openBandwidth(): Promise<Bandwidth> {
  const pair = await openPair(LENGTH_BYTES);
  const count = LENGTH_BYTES / BLOCK_BYTES;
  const { close, ...prepared } = await lists(pair, BLOCK_BYTES, count);
  const orders = {
    contiguous: [inOrder(count), inOrder(count)],
    fragmented: [shuffled(count, 1), shuffled(count, 2)],
  } as const;
  return {
    async transferMs(lengthBytes, order) {
      const blocks = Math.min(count, Math.max(1, Math.round(lengthBytes / BLOCK_BYTES)));
      const [mine, theirs] = orders[order];
      const times: number[] = [];
      for (let i = 0; i < ROUNDS; i++) {
        const begunMs = performance.now();
        const ids = { localIds: mine.slice(0, blocks), remoteIds: theirs.slice(0, blocks) };
        await pair.agent.transfer({ operation: "READ", ...prepared, ...ids }).done;
        times.push(performance.now() - begunMs);
      }
      return (median(times) * lengthBytes) / (blocks * BLOCK_BYTES);
    },
    async close() {
      await close();
      await pair.close();
    },
  };
}
