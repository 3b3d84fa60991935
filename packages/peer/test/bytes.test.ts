import type { Notification } from "@kv/interface";
import { findLibrary, nixlTransport } from "@kv/nixl";
import { describe, expect, test } from "vitest";
import type { BytesQuestion } from "../src/doctor/bytes-probe.js";
import { bytesInProcess } from "../src/doctor/bytes-process.js";

// The probe in a process of its own, over real NIXL, against memory of this one.
const nixlMissing = await findLibrary().then(
  () => undefined,
  (error: Error) => error.message.split("\n")[0],
);
/** Node, tsx, NIXL and UCX start in it, on a machine that may be busy. */
const TIMEOUT_MS = 120_000;
const BLOCK_BYTES = 4096;
const BLOCKS = 8;

function question(agentMetadata: Uint8Array, baseAddress: number, write: boolean): BytesQuestion {
  return {
    agentMetadata: Buffer.from(agentMetadata).toString("base64"),
    deviceId: 0,
    memoryType: "DRAM",
    regions: [
      { baseAddress, numBlocks: BLOCKS, blockLengthBytes: BLOCK_BYTES, blockStrideBytes: BLOCK_BYTES },
    ],
    limitBytes: 1 << 20,
    write,
    farewells: [],
    backends: [],
  };
}

describe.skipIf(nixlMissing)(
  `bytes over NIXL (${nixlMissing ?? "found"})`,
  { timeout: 2 * TIMEOUT_MS },
  () => {
    test("memory of another process is read and written as it was, what UCX goes over is named, and each rank hears the farewell", async () => {
      const transport = nixlTransport();
      const memory = transport.allocate(BLOCKS * BLOCK_BYTES);
      for (const [index] of memory.bytes.entries()) memory.bytes[index] = index % 253;
      const before = memory.bytes.slice();
      const farewells: BytesQuestion["farewells"][number][] = [];
      const heard: Promise<IteratorResult<Notification>>[] = [];
      // Nothing is read from the ranks behind the first.
      const ranks = [await transport.createAgent(), await transport.createAgent()];
      for (const agent of ranks) {
        await agent.register(memory);
        const agentMetadata = Buffer.from(await agent.localMetadata()).toString("base64");
        farewells.push({ agentMetadata, text: "request:1" });
        heard.push(agent.notifications().next());
      }
      const asked = question((await ranks[0]?.localMetadata()) ?? new Uint8Array(), memory.address, true);
      const outcome = await bytesInProcess({ ...asked, farewells }, TIMEOUT_MS);
      expect(outcome).toMatchObject({
        kind: "answered",
        answer: { backends: ["UCX"], isStable: true, bulk: { lengthBytes: BLOCKS * BLOCK_BYTES } },
      });
      expect(outcome.kind === "answered" ? outcome.lanes.length : 0).toBeGreaterThan(0);
      expect(Buffer.compare(memory.bytes, before)).toBe(0);
      for (const each of heard) {
        const { value } = await each;
        expect(new TextDecoder().decode((value as Notification).payload)).toBe("request:1");
      }
      await transport.close();
      memory.close();
    });

    test("metadata that is none is an outcome, not the end of this process", async () => {
      const outcome = await bytesInProcess(question(new Uint8Array(40).fill(7), 4096, false), TIMEOUT_MS);
      expect(["failed", "died"]).toContain(outcome.kind);
    });
  },
);
