import type { Notification } from "@kv/interface";
import { findLibrary, nixlTransport } from "@kv/nixl";
import { describe, expect, test } from "vitest";
import type { ProbeRequest } from "../src/doctor/memory/memory-probe.js";
import { probeInChildProcess } from "../src/doctor/memory/probe-process.js";

// The probe runs in a child process over real NIXL and reads the memory of this one.
const nixlMissing = await findLibrary().then(
  () => undefined,
  (error: Error) => error.message.split("\n")[0],
);
/** The child starts Node, tsx, NIXL and UCX, possibly on a busy machine. */
const TIMEOUT_MS = 120_000;
const BLOCK_BYTES = 4096;
const BLOCKS = 8;

function probeRequest(agentMetadata: Uint8Array, baseAddress: number, write: boolean): ProbeRequest {
  return {
    agentMetadata: Buffer.from(agentMetadata).toString("base64"),
    deviceId: 0,
    memoryType: "DRAM",
    regions: [
      { baseAddress, numBlocks: BLOCKS, blockLengthBytes: BLOCK_BYTES, blockStrideBytes: BLOCK_BYTES },
    ],
    limitBytes: 1 << 20,
    write,
    notifications: [],
    backends: [],
  };
}

describe.skipIf(nixlMissing)(
  `bytes over NIXL (${nixlMissing ?? "found"})`,
  { timeout: 2 * TIMEOUT_MS },
  () => {
    test("the memory of another process is read and written back unchanged, UCX's transport is named, and each rank is notified", async () => {
      const transport = nixlTransport();
      const memory = transport.allocate(BLOCKS * BLOCK_BYTES);
      for (const [index] of memory.bytes.entries()) memory.bytes[index] = index % 253;
      const before = memory.bytes.slice();
      const notifications: ProbeRequest["notifications"][number][] = [];
      const received: Promise<IteratorResult<Notification>>[] = [];
      // Only the memory of the first rank is read.
      const ranks = [await transport.createAgent(), await transport.createAgent()];
      for (const agent of ranks) {
        await agent.register(memory);
        const agentMetadata = Buffer.from(await agent.localMetadata()).toString("base64");
        notifications.push({ agentMetadata, text: "request:1" });
        received.push(agent.notifications().next());
      }
      const request = probeRequest(
        (await ranks[0]?.localMetadata()) ?? new Uint8Array(),
        memory.address,
        true,
      );
      const outcome = await probeInChildProcess({ ...request, notifications }, TIMEOUT_MS);
      expect(outcome).toMatchObject({
        kind: "completed",
        result: { backends: ["UCX"], isStable: true, bulk: { lengthBytes: BLOCKS * BLOCK_BYTES } },
      });
      expect(outcome.kind === "completed" ? outcome.lanes.length : 0).toBeGreaterThan(0);
      expect(Buffer.compare(memory.bytes, before)).toBe(0);
      for (const each of received) {
        const { value } = await each;
        expect(new TextDecoder().decode((value as Notification).payload)).toBe("request:1");
      }
      await transport.close();
      memory.close();
    });

    test("invalid metadata is an outcome and does not end this process", async () => {
      const outcome = await probeInChildProcess(
        probeRequest(new Uint8Array(40).fill(7), 4096, false),
        TIMEOUT_MS,
      );
      expect(["failed", "crashed"]).toContain(outcome.kind);
    });
  },
);
