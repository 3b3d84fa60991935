import { performance } from "node:perf_hooks";
import { nixlTransport } from "@kv/nixl";
import { loopDelay, pause } from "./nixl/event-loop.js";
import { inOrder, shuffled } from "./nixl/fixture.js";
import { nodeTarget, pythonNixl } from "./python-peer.js";
import type { Row } from "./report.js";
import { pairRatio, spread } from "./report.js";

const LENGTH_BYTES = 512 * 2 ** 20;
const ROUNDS = 9;

/** READs of 512 MiB from another process by Node and Python in turn, with the same target; and the delay of the event loop meanwhile. */
export async function read(): Promise<readonly Row[]> {
  const target = nodeTarget();
  const python = await pythonNixl();
  const transport = nixlTransport();
  const rows: Row[] = [];
  try {
    const { metadata, address } = await target.ask<{ metadata: string; address: number }>({
      lengthBytes: LENGTH_BYTES,
    });
    await python.ask({ do: "open", metadata, address, length: LENGTH_BYTES });
    const agent = await transport.createAgent();
    const memory = transport.allocate(LENGTH_BYTES);
    await agent.register(memory);
    const remoteName = await agent.addRemote(Buffer.from(metadata, "hex"));
    for (const block of [64 * 1024]) {
      const count = LENGTH_BYTES / block;
      const table = (base: number) => ({
        memoryType: "DRAM" as const,
        rows: Float64Array.of(base, block, 0, block, count),
      });
      const local = await agent.prepareLocal(table(memory.address));
      const remote = await agent.prepareRemote(remoteName, table(address));
      for (const order of ["scattered", "contiguous"] as const) {
        const localIds = order === "scattered" ? shuffled(count, 1) : inOrder(count);
        const remoteIds = order === "scattered" ? shuffled(count, 2) : localIds;
        const ours: number[] = [];
        const theirs: number[] = [];
        const readOnce = async () => {
          const begun = performance.now();
          await agent.transfer({ operation: "READ", local, localIds, remote, remoteIds }).done;
          return performance.now() - begun;
        };
        const theirsOnce = async () =>
          (
            await python.ask<{ ms: number }>({
              do: "read",
              block,
              count,
              local: [...localIds],
              remote: [...remoteIds],
            })
          ).ms;
        await readOnce();
        await theirsOnce();
        for (let i = 0; i < ROUNDS; i += 1) {
          ours.push(LENGTH_BYTES / (await readOnce()) / 1e6);
          theirs.push(LENGTH_BYTES / (await theirsOnce()) / 1e6);
        }
        const ratio = pairRatio(ours, theirs);
        rows.push({
          what: `READ 512 MiB in ${block / 1024} KiB blocks, ${order}: bandwidth / Python NIXL`,
          ours: spread(ours, "GB/s"),
          theirs: spread(theirs, "GB/s"),
          ratio,
          wanted: ">= 0.95",
          met: ratio >= 0.95,
        });
        const idle: number[] = [];
        const busy: number[] = [];
        const maxima: number[] = [];
        for (let i = 0; i < ROUNDS; i += 1) {
          let lasted = 300;
          const during = await loopDelay(async () => {
            const begun = performance.now();
            while (performance.now() - begun < 300) await readOnce();
            lasted = performance.now() - begun;
          });
          const still = await loopDelay(() => pause(lasted));
          busy.push(during.p99);
          idle.push(still.p99);
          maxima.push(during.max);
        }
        const over = busy.map((value, i) => value - (idle[i] ?? 0)).sort((a, b) => a - b);
        const middle = over[over.length >> 1] ?? Number.NaN;
        rows.push({
          what: `event-loop delay during the READ (${order}), p99 over idle; maximum ${Math.max(...maxima).toFixed(1)} ms`,
          ours: spread(busy, "ms"),
          theirs: `idle ${spread(idle, "ms")}`,
          ratio: undefined,
          wanted: `<= 2 ms over idle (is ${middle.toFixed(2)})`,
          met: middle <= 2,
        });
      }
      await local.close();
      await remote.close();
    }
  } finally {
    await transport.close();
    await python.close();
    await target.close();
  }
  return rows;
}
