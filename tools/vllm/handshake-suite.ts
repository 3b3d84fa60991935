import {
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeReply,
  decodeMsgpack,
  describedVersion,
  encodeAgentMetadata,
  encodeHandshakeRequest,
  type VllmVersion,
  vllmWire,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import { afterAll, expect, test } from "vitest";
import { compareWire } from "../../packages/peer/src/wire/compare-wire.js";
import { readWire } from "../../packages/peer/src/wire/read-wire.js";
import { sourcesOf, type VllmServer } from "./server.js";
import { factorsOf, TINY } from "./tiny-peer.js";

/**
 * Only our ZMQ and msgpack. When other suites fail, this one shows whether the handshake is the
 * cause.
 */
export function handshakeSuite(server: () => VllmServer): void {
  const sideChannel = zmqSideChannel();
  afterAll(() => sideChannel.close());

  async function ask(tpRank: number) {
    const reply = await sideChannel.request({
      host: "127.0.0.1",
      port: server().sideChannelPort,
      frames: [encodeHandshakeRequest({ ppRank: 0, tpRank })],
      timeoutMs: 5000,
    });
    return { reply, ...decodeHandshakeReply(reply.frames) };
  }

  test("kv-peer wire knows all of this release: its messages, and the members of clients' requests", async () => {
    const report = compareWire(await readWire(sourcesOf(server().kind.version)));
    expect(report).toMatchObject({ differences: [], requestsCompared: true });
  });

  test("our compatibility hash equals the hash that vLLM sends", async () => {
    const { payload } = await ask(0);
    expect(payload.compatibilityHash).toBe(compatibilityHash(factorsOf(server().kind)));
  });

  test("each rank's metadata describes its share of the cache, and encodes to the received bytes", async () => {
    for (const tpRank of [0, 1]) {
      const { payload } = await ask(tpRank);
      const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
      expect(metadata).toMatchObject({
        kvCacheLayout: "LBHNC",
        attentionBackend: "CPU_ATTN",
        blockSize: TINY.blockSize,
        blockLengthsBytes: Array(TINY.layers).fill(
          (TINY.kvHeads / 2) * TINY.blockSize * TINY.contentBytes,
        ),
        regionNames: Array.from({ length: TINY.layers }, (_, layer) => TINY.layerName(layer)),
      });
      // vLLM ignores keys of newer versions.
      const known = vllmWire(describedVersion(server().kind.version) as VllmVersion)[
        "agent metadata"
      ];
      const own = Object.entries(decodeMsgpack(encodeAgentMetadata(metadata), "ours") as object);
      expect(Object.fromEntries(own.filter(([key]) => key in known))).toEqual(
        decodeMsgpack(payload.agentMetadataBytes, "vLLM's"),
      );
    }
  });

  test("vLLM's clock advances between two replies, by at most the time that both requests took", async () => {
    const first = await ask(0);
    const second = await ask(0);
    const there = (second.clockSeconds ?? 0) - (first.clockSeconds ?? 0);
    expect(there).toBeGreaterThan(0);
    expect(there * 1000).toBeLessThanOrEqual(second.reply.receivedAtMs - first.reply.sentAtMs);
  });
}
