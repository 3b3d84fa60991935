import { nixlTransport } from "@kv/nixl";
import { inOrder, shuffled } from "../../nixl/fixture.js";
import { nodeTarget } from "../../python-peer.js";
import { median } from "../../report.js";
import { BLOCK_BYTES } from "../workload.js";

/** Measures how long one transfer takes between two processes on this machine, in ms, with the caches' block size. */
export interface Bandwidth {
  transferMs(lengthBytes: number, order: "contiguous" | "fragmented"): Promise<number>;
  close(): Promise<void>;
}

const LENGTH_BYTES = 32 * 2 ** 20;
const ROUNDS = 7;

export async function openBandwidth(): Promise<Bandwidth> {
  const far = nodeTarget();
  const transport = nixlTransport();
  const opened = await far.ask<{ metadata: string; address: number; name: string }>({
    do: "open",
    lengthBytes: LENGTH_BYTES,
  });
  const agent = await transport.createAgent();
  const memory = transport.allocate(LENGTH_BYTES);
  await agent.register(memory);
  await agent.addRemote(Buffer.from(opened.metadata, "hex"));
  const count = LENGTH_BYTES / BLOCK_BYTES;
  const table = (address: number) => ({
    memoryType: "DRAM" as const,
    rows: Float64Array.of(address, BLOCK_BYTES, 0, BLOCK_BYTES, count),
  });
  const local = await agent.prepareLocal(table(memory.address));
  const remote = await agent.prepareRemote(opened.name, table(opened.address));
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
        await agent.transfer({
          operation: "READ",
          local,
          localIds: mine.slice(0, blocks),
          remote,
          remoteIds: theirs.slice(0, blocks),
        }).done;
        times.push(performance.now() - begunMs);
      }
      return (median(times) * lengthBytes) / (blocks * BLOCK_BYTES);
    },
    async close() {
      await local.close();
      await remote.close();
      await transport.close();
      memory.close();
      await far.close();
    },
  };
}
