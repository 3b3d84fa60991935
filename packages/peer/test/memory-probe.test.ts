import type { Notification } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { decodeHandshakeReply, encodeAgentMetadata, encodeHandshakePayload } from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { describe, expect, test, vi } from "vitest";
import { readsOf } from "../src/doctor/memory/memory-checks.js";
import { type ProbeRequest, probeInChildProcess } from "../src/doctor/memory/memory-probe.js";
import { pairDoctor } from "../src/doctor/pair-doctor.js";
import { readTarget } from "../src/doctor/target.js";
import { METADATA, REPLY } from "./sample-recording.js";

// The probe runs in a child process over real NIXL and reads the memory of this one.
/** The child starts Node, tsx, NIXL and UCX, possibly on a busy machine. */
const TIMEOUT_MS = 120_000;
const BLOCK_BYTES = 4096;
const BLOCKS = 8;

function probeRequest(
  agentMetadata: Uint8Array,
  baseAddress: number,
  write: boolean,
): ProbeRequest {
  return {
    agentMetadata: Buffer.from(agentMetadata).toString("base64"),
    deviceId: 0,
    memoryType: "DRAM",
    regions: [
      {
        baseAddress,
        numBlocks: BLOCKS,
        blockLengthBytes: BLOCK_BYTES,
        blockStrideBytes: BLOCK_BYTES,
      },
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
        kind: "answered",
        value: { backends: ["UCX"], isStable: true, bulk: { lengthBytes: BLOCKS * BLOCK_BYTES } },
      });
      if (outcome.kind !== "answered") throw new Error(outcome.kind);
      expect(readsOf(outcome.output).length).toBeGreaterThan(0);
      // The null block is moved several times, so that the time can be measured.
      expect(outcome.value?.write).toMatchObject({
        lengthBytes: BLOCK_BYTES,
        movedBytes: 64 * BLOCK_BYTES,
      });
      expect(outcome.value?.write?.writeMs).toBeGreaterThan(0);
      expect(outcome.value?.write?.readMs).toBeGreaterThan(0);
      expect(Buffer.compare(memory.bytes, before)).toBe(0);
      for (const each of received) {
        const { value } = await each;
        expect(new TextDecoder().decode((value as Notification).payload)).toBe("request:1");
      }
      await transport.close();
      memory.close();
    });

    test("TCP on one host is a warning that names the better transport and UCX_TLS, and READ is compared with WRITE", async () => {
      for (const name of ["UCX_TLS", "UCX_NET_DEVICES"]) vi.stubEnv(name, "all");
      const transport = nixlTransport();
      const blockBytes = 1 << 20;
      const memory = transport.allocate(BLOCKS * blockBytes);
      const agent = await transport.createAgent();
      await agent.register(memory);
      const { payload } = decodeHandshakeReply(REPLY);
      const agentMetadataBytes = encodeAgentMetadata({
        ...METADATA,
        agentMetadata: await agent.localMetadata(),
        baseAddresses: [memory.address],
        numBlocks: BLOCKS,
        blockLengthsBytes: [blockBytes],
        blockStridesBytes: [blockBytes],
        regionNumBlocks: [BLOCKS],
        regionGroupIds: [0],
        regionNames: ["model.layers.0"],
        regionMemoryTypes: ["DRAM"],
      });
      const frames = [encodeHandshakePayload({ ...payload, agentMetadataBytes }), REPLY[1]];
      const sideChannel = zmqSideChannel();
      const place = { host: "127.0.0.1", port: 0 };
      const listener = await sideChannel.listen({ ...place, answer: () => frames });
      vi.stubEnv("UCX_TLS", "tcp");
      try {
        const { checks } = await pairDoctor({
          prefill: readTarget(`127.0.0.1:${listener.port}`),
          sideChannel,
          bytes: { write: true, timeoutMs: TIMEOUT_MS },
        });
        const check = (id: string) => checks.find((each) => each.id === id);
        const transportFound = check("bytes.prefill-transport");
        expect(transportFound).toMatchObject({
          status: "warn",
          fix: expect.stringContaining("UCX_TLS"),
        });
        // Where a process may not read the memory of another one (ptrace scope), UCX has nothing
        // better than TCP for READ.
        expect(transportFound?.found).toMatch(
          /^UCX over .*\btcp\/\S+.*(; without UCX_TLS=tcp on this host it is .*\bcma\b.* \(\S+ GB\/s instead of \S+ GB\/s\)|, although the server is on this host)$/,
        );
        expect(check("bytes.prefill-mode")?.found).toMatch(
          /^pull is used; WRITE \S+ GB\/s, READ \S+ GB\/s/,
        );
      } finally {
        vi.unstubAllEnvs();
        await listener.close();
        await sideChannel.close();
        await transport.close();
        memory.close();
      }
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
