import type { SideChannel } from "@kv/interface";
import {
  type CompatibilityExplanation,
  compatibilityHash,
  decodeHandshakeRequest,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  sealHandshake,
} from "@kv/protocol";
import { describe, expect, it } from "vitest";
import type { EngineAddress } from "../requests/remote-request.js";
import { shakeHands } from "./handshake-client.js";

const address: EngineAddress = {
  engineId: "p0",
  host: "prefill",
  port: 5600,
  tpSize: 2,
  dcpSize: 1,
  ppSize: 1,
};
const factors = { model: "tiny", dtype: "torch.float32" };
const hash = compatibilityHash(factors);

const metadataBytes = (engineId: string, agentBytes = 3) =>
  encodeAgentMetadata({
    engineId,
    agentMetadata: new Uint8Array(agentBytes),
    baseAddresses: [4096],
    deviceId: 0,
    numBlocks: 8,
    blockLengthsBytes: [64],
    blockStridesBytes: [64],
    kvCacheLayout: "LBHNC",
    blockSize: 16,
    ssmSizes: [0, 0],
    attentionBackend: "SIM",
    physicalBlocksPerLogical: 1,
    dcpSize: 1,
    pcpSize: 1,
    pleBlockLengthBytes: null,
    regionMembers: [],
    packedMemberLayouts: {},
    rest: {},
  });

interface Peer {
  readonly engineId?: string;
  readonly factors?: Record<string, unknown>;
  readonly tellsFactors?: boolean;
  readonly agentMetadataBytes?: Uint8Array;
  readonly clockSeconds?: (asked: number) => number;
  readonly frames?: readonly Uint8Array[];
  readonly sealsForRank?: number;
  /** How long the n-th request takes. */
  readonly tookMs?: (asked: number) => number;
}

/** A side channel that answers as `peer`. The n-th request takes n × 10 ms. */
function peerOf(peer: Peer) {
  const asked: { port: number; tpRank: number }[] = [];
  let nowMs = 0;
  const sideChannel: SideChannel = {
    async request({ port, frames }) {
      const rank = decodeHandshakeRequest(frames);
      const { tpRank } = rank;
      asked.push({ port, tpRank });
      const sentAtMs = nowMs;
      nowMs += peer.tookMs?.(asked.length) ?? asked.length * 10;
      const theirs = peer.factors ?? factors;
      const payload = encodeHandshakePayload({
        compatibilityHash: compatibilityHash(theirs),
        agentMetadataBytes: peer.agentMetadataBytes ?? metadataBytes(peer.engineId ?? "p0"),
        ...(peer.tellsFactors === true ? { extension: { factors: theirs, incarnation: "i" } } : {}),
        rest: {},
      });
      const answersTo = { ...rank, tpRank: peer.sealsForRank ?? tpRank };
      const sealed = peer.tellsFactors === true ? sealHandshake(payload, answersTo) : payload;
      const clockSeconds = peer.clockSeconds?.(asked.length) ?? (sentAtMs + nowMs) / 2 / 1000 + 100;
      return {
        frames: peer.frames ?? encodeHandshakeReply(sealed, clockSeconds),
        sentAtMs,
        receivedAtMs: nowMs,
      };
    },
    listen: () => Promise.reject(new Error("not here")),
    close: async () => {},
  };
  const options = {
    sideChannel,
    timeoutMs: 5000,
    compatibility: { hash, factors, enforced: true },
  };
  return { asked, options };
}

describe("shakeHands", () => {
  it("accepts only a payload that is sealed for the requested rank", async () => {
    const { options } = peerOf({ tellsFactors: true, sealsForRank: 1 });
    await expect(shakeHands(address, [0], options)).rejects.toMatchObject({
      code: "KV_HANDSHAKE_UNTRUSTED",
    });
  });

  it.each([
    ["send more than 64 MiB", { agentMetadataBytes: metadataBytes("p0", 2 ** 22) }],
    ["take longer than a minute", { tookMs: () => 4000 }],
  ])("A3: the ranks of one engine together cannot %s", async (_, peer) => {
    const { asked, options } = peerOf(peer);
    const ranks = Array.from({ length: 8 }, (_rank, at) => at);
    await expect(shakeHands({ ...address, ppSize: 65_536 }, ranks, options)).rejects.toMatchObject({
      code: "KV_WIRE_LIMIT_EXCEEDED",
      message: expect.stringContaining("together"),
    });
    expect(asked.length).toBeLessThanOrEqual(16);
  });

  it("requests each rank's metadata, and uses the clock sample with the shortest round trip", async () => {
    const { asked, options } = peerOf({ tellsFactors: true });
    const { ranks, clock, extension } = await shakeHands(address, [0, 1], options);
    expect(asked).toEqual([
      { port: 5600, tpRank: 0 },
      { port: 5600, tpRank: 1 },
    ]);
    expect(ranks.map(({ tpRank, metadata }) => [tpRank, metadata.numBlocks])).toEqual([
      [0, 8],
      [1, 8],
    ]);
    expect(clock.rttMs).toBe(10);
    expect(clock.offsetMs).toBeCloseTo(100_000, 6);
    expect(extension?.incarnation).toBe("i");
  });

  it("with portPerRank, requests rank r's metadata at the engine's port + r", async () => {
    const { asked, options } = peerOf({});
    await shakeHands(address, [1], { ...options, portPerRank: true });
    expect(asked).toEqual([{ port: 5601, tpRank: 1 }]);
  });

  it("names the compatibility factor that differs before it decodes the metadata", async () => {
    const { options } = peerOf({
      factors: { ...factors, dtype: "torch.bfloat16" },
      agentMetadataBytes: new Uint8Array([0xc1]),
    });
    for (const tellsFactors of [true, false]) {
      const peer = peerOf({ factors: { ...factors, dtype: "torch.bfloat16" }, tellsFactors });
      await expect(shakeHands(address, [0], peer.options)).rejects.toMatchObject({
        code: "KV_HANDSHAKE_INCOMPATIBLE",
        message: expect.stringMatching(/dtype.*float32.*bfloat16/) as string,
      });
    }
    await expect(shakeHands(address, [0], options)).rejects.toMatchObject({
      code: "KV_HANDSHAKE_INCOMPATIBLE",
    });
    const enforced = false;
    const lax = { ...options, compatibility: { ...options.compatibility, enforced } };
    await expect(shakeHands(address, [0], lax)).rejects.toMatchObject({
      code: "KV_WIRE_MALFORMED",
    });
  });

  it("accepts a different compatibility hash only when it is not enforced, and reports the differences once", async () => {
    const { options } = peerOf({ factors: { ...factors, dtype: "torch.bfloat16" } });
    const told: CompatibilityExplanation[] = [];
    const relaxed = (why: CompatibilityExplanation) => void told.push(why);
    const compatibility = { ...options.compatibility, relaxed };
    await expect(shakeHands(address, [0, 1], { ...options, compatibility })).rejects.toMatchObject({
      code: "KV_HANDSHAKE_INCOMPATIBLE",
    });
    expect(told).toEqual([]);
    const lax = { ...options, compatibility: { ...compatibility, enforced: false } };
    expect((await shakeHands(address, [0, 1], lax)).ranks).toHaveLength(2);
    expect(told.map(({ differences }) => differences)).toEqual([
      [{ factor: "dtype", ours: "torch.float32", theirs: "torch.bfloat16" }],
    ]);
    const equal = peerOf({});
    const enforced = false;
    await shakeHands(address, [0], {
      ...equal.options,
      compatibility: { ...compatibility, enforced },
    });
    expect(told).toHaveLength(1);
  });

  it("refuses a reply of another engine, and names both engine ids", async () => {
    const { options } = peerOf({ engineId: "stranger" });
    await expect(shakeHands(address, [0], options)).rejects.toMatchObject({
      code: "KV_HANDSHAKE_WRONG_ENGINE",
      message: expect.stringMatching(/stranger.*p0/) as string,
    });
  });

  it("reports a peer's refusal with its reason, and a malformed reply as KV_WIRE_MALFORMED", async () => {
    const refusing = peerOf({ frames: [encodeHandshakeRefusal("no such rank")] });
    await expect(shakeHands(address, [0], refusing.options)).rejects.toMatchObject({
      code: "KV_HANDSHAKE_REFUSED",
      message: expect.stringContaining("no such rank") as string,
    });
    for (const frames of [[], [new Uint8Array([0xc1])], [new Uint8Array(0), new Uint8Array(0)]]) {
      await expect(shakeHands(address, [0], peerOf({ frames }).options)).rejects.toMatchObject({
        code: "KV_WIRE_MALFORMED",
      });
    }
    const clockless = peerOf({ clockSeconds: () => Number.NaN });
    await expect(shakeHands(address, [0], clockless.options)).rejects.toMatchObject({
      code: "KV_WIRE_MALFORMED",
    });
  });

  it("refuses a peer of an older version, whose reply has no clock", async () => {
    const payload = encodeHandshakePayload({
      compatibilityHash: hash,
      agentMetadataBytes: metadataBytes("p0"),
      rest: {},
    });
    await expect(
      shakeHands(address, [0], peerOf({ frames: [payload] }).options),
    ).rejects.toMatchObject({
      code: "KV_HANDSHAKE_INCOMPATIBLE",
      message: expect.stringContaining("version") as string,
    });
  });
});
