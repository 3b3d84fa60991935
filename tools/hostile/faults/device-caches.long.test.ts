// A long suite: fault runs over the addon; npm test has those over the memory transport.
import type { Memory, Transport } from "@kv/interface";
import { deviceMemory, nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { held } from "@kv/testing/nothing-left";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import { memoryNetwork } from "@kv/transport-memory";
import { describe, expect, test } from "vitest";

const BLOCK_TOKENS = 16;

/**
 * The fake NIXL's device memory is ordinary memory. `data` gives the engine's model access to it;
 * the connector has none.
 */
function deviceMemoryTransport(transport: Transport, deviceId: number): Transport {
  const handles = new WeakMap<Memory, Memory>();
  return {
    ...transport,
    allocate(lengthBytes) {
      const backing = transport.allocate(lengthBytes);
      const { address } = backing;
      const handle = deviceMemory({ address, lengthBytes, deviceId, check: "none" });
      const memory = {
        ...handle,
        data: backing.bytes,
        close() {
          handle.close();
          backing.close();
        },
      };
      handles.set(memory, handle);
      return memory;
    },
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      return { ...agent, register: (memory) => agent.register(handles.get(memory) ?? memory) };
    },
  };
}

describe.skipIf(fakeMissing)(
  `caches in device memory (${fakeMissing ?? "fake NIXL found"})`,
  () => {
    test.each([
      { from: "VRAM", to: "VRAM", tpSizes: [1, 1] },
      { from: "VRAM", to: "VRAM", tpSizes: [2, 1] },
      { from: "VRAM", to: "DRAM", tpSizes: [1, 2] },
      { from: "DRAM", to: "VRAM", tpSizes: [1, 1] },
    ] as const)(
      "pull from $from to $to with TP $tpSizes moves every byte and leaves nothing held",
      async ({ from, to, tpSizes }) => {
        const network = memoryNetwork();
        const violations: string[] = [];
        const start = (
          hostName: string,
          memoryType: "DRAM" | "VRAM",
          tpSize: number,
          deviceId: number,
        ) => {
          const nixl = nixlTransport({ library: FAKE_NIXL, backends: ["UCX"] });
          return createSimEngine({
            network,
            hostName,
            engineId: hostName,
            tpSize,
            memoryType,
            blockSize: BLOCK_TOKENS,
            numBlocks: 64,
            transport: memoryType === "DRAM" ? nixl : deviceMemoryTransport(nixl, deviceId),
            violation: (what) => void violations.push(what),
          });
        };
        const p = await start("p", from, tpSizes[0], 1);
        const d = await start("d", to, tpSizes[1], 2);
        await Promise.all(
          Array.from({ length: 6 }, async (_, n) => {
            const request = { requestId: `r${n}`, prompt: n, numTokens: (n + 1) * BLOCK_TOKENS };
            const params = await p.prefill(request);
            await d.decode({ ...request, params });
          }),
        );

        for (const each of [p, d]) await expect.poll(() => held(each.outstanding())).toEqual({});
        expect(violations).toEqual([]);
        await Promise.all([p.close(), d.close()]);
      },
    );
  },
);
