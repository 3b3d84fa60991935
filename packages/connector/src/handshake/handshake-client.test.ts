import { type SideChannel, silentLog } from "@kv/interface";
import {
  type CompatibilityFactors,
  compatibilityHash,
  decodeHandshakePayload,
  decodeHandshakeRequest,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  sealHandshake,
} from "@kv/protocol";
import { engineIdentity } from "@kv/testing/engine-identity";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { testRank } from "@kv/testing/worker-context";
import { describe, expect, it } from "vitest";
import { connectorSettings } from "../config/connector-settings.js";
import { readTransferConfig } from "../config/transfer-config.js";
import type { EngineAddress } from "../requests/references.js";
import { ConnectorHandshake } from "./connector-handshake.js";
import { describeRank } from "./rank-geometry.js";

const address: EngineAddress = {
  engineId: "p0",
  host: "prefill",
  port: 5600,
  tpSize: 2,
  dcpSize: 1,
  ppSize: 1,
};
const metadataBytes = (engineId: string, agentBytes = 3) =>
  encodeAgentMetadata(
    describeRank(testRank(), { engineId, agentMetadata: new Uint8Array(agentBytes) }),
  );

interface Peer {
  readonly engineId?: string;
  readonly dtype?: string;
  readonly tellsFactors?: boolean;
  readonly agentMetadataBytes?: Uint8Array;
  readonly clockSeconds?: (asked: number) => number;
  readonly frames?: readonly Uint8Array[];
  readonly sealsForRank?: number;
  /** Of the side that asks. */
  readonly extra?: Readonly<Record<string, unknown>>;
  /** How long the n-th request takes. */
  readonly tookMs?: (asked: number) => number;
}

/** Asks `peer`, whose factors are the own ones but for `dtype`. The n-th request takes n × 10 ms. */
function asking(peer: Peer) {
  const asked: { port: number; tpRank: number }[] = [];
  let nowMs = 0;
  const sideChannel: SideChannel = {
    async request({ port, frames }) {
      const rank = decodeHandshakeRequest(frames);
      const { tpRank } = rank;
      asked.push({ port, tpRank });
      const sentAtMs = nowMs;
      nowMs += peer.tookMs?.(asked.length) ?? asked.length * 10;
      const theirs = { ...own, dtype: peer.dtype ?? own.dtype };
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
  const handshake = new ConnectorHandshake({
    sideChannel,
    settings: connectorSettings(
      readTransferConfig({
        kv_connector: "pull",
        kv_role: "kv_both",
        kv_connector_extra_config: peer.extra ?? {},
      }),
    ),
    engine: engineIdentity("d"),
    cache: simConfig(16),
    local: testRank(),
    transferMode: "pull",
    log: silentLog,
  });
  const { extension } = decodeHandshakePayload(handshake.payload(new Uint8Array()));
  const own = extension?.["factors"] as CompatibilityFactors;
  const ask = (tpRanks: readonly number[], change: Partial<EngineAddress> = {}) =>
    handshake.ask({ ...address, ...change }, tpRanks);
  return { asked, own, ask };
}

const BFLOAT16 = { dtype: "torch.bfloat16" };
const RELAXED = { enforce_handshake_compat: false };

const MALFORMED_METADATA = { ...BFLOAT16, agentMetadataBytes: new Uint8Array([0xc1]) };
const FACTOR = /dtype.*float32.*bfloat16/;
const EMPTY = new Uint8Array(0);
const WITHOUT_CLOCK = encodeHandshakePayload({
  compatibilityHash: compatibilityHash(asking({}).own),
  agentMetadataBytes: metadataBytes("p0"),
  rest: {},
});

describe("a handshake", () => {
  it.each<[string, Peer, code: string, message?: RegExp]>([
    [
      "a payload that is sealed for another rank",
      { tellsFactors: true, sealsForRank: 1 },
      "KV_HANDSHAKE_UNTRUSTED",
    ],
    [
      "another engine, and names both",
      { engineId: "stranger" },
      "KV_HANDSHAKE_WRONG_ENGINE",
      /stranger.*p0/,
    ],
    [
      "a peer that refuses, with its reason",
      { frames: [encodeHandshakeRefusal("no such rank")] },
      "KV_HANDSHAKE_REFUSED",
      /no such rank/,
    ],
    ["no frames", { frames: [] }, "KV_WIRE_MALFORMED"],
    ["one malformed frame", { frames: [new Uint8Array([0xc1])] }, "KV_WIRE_MALFORMED"],
    ["two empty frames", { frames: [EMPTY, EMPTY] }, "KV_WIRE_MALFORMED"],
    ["a clock that is none", { clockSeconds: () => Number.NaN }, "KV_WIRE_MALFORMED"],
    [
      "an older version, whose reply has no clock",
      { frames: [WITHOUT_CLOCK] },
      "KV_HANDSHAKE_INCOMPATIBLE",
      /version/,
    ],
    ["another hash, and names the factor", BFLOAT16, "KV_HANDSHAKE_INCOMPATIBLE", FACTOR],
    [
      "a factor that the peer tells",
      { ...BFLOAT16, tellsFactors: true },
      "KV_HANDSHAKE_INCOMPATIBLE",
      FACTOR,
    ],
    ["another hash before the metadata", MALFORMED_METADATA, "KV_HANDSHAKE_INCOMPATIBLE"],
    [
      "malformed metadata where the hash is not enforced",
      { ...MALFORMED_METADATA, extra: RELAXED },
      "KV_WIRE_MALFORMED",
    ],
  ])("refuses %s", async (_, peer, code, message = /./) => {
    const error = await asking(peer)
      .ask([0])
      .then(
        ({ refused }) => refused?.error,
        (thrown: unknown) => thrown,
      );
    expect(error).toMatchObject({ code, message: expect.stringMatching(message) as string });
  });

  it.each([
    ["send more than 64 MiB", { agentMetadataBytes: metadataBytes("p0", 2 ** 22) }],
    ["take longer than a minute", { tookMs: () => 4000 }],
  ])("A3: the ranks of one engine together cannot %s", async (_, peer) => {
    const { asked, ask } = asking(peer);
    const ranks = Array.from({ length: 8 }, (_rank, at) => at);
    await expect(ask(ranks, { ppSize: 65_536 })).rejects.toMatchObject({
      code: "KV_WIRE_LIMIT_EXCEEDED",
      message: expect.stringContaining("together"),
    });
    expect(asked.length).toBeLessThanOrEqual(16);
  });

  it("requests each rank's metadata, and uses the clock sample with the shortest round trip", async () => {
    const { asked, ask } = asking({ tellsFactors: true });
    const { ranks, clock, incarnation } = await ask([0, 1]);
    expect(asked).toEqual([
      { port: 5600, tpRank: 0 },
      { port: 5600, tpRank: 1 },
    ]);
    expect(ranks.map(({ tpRank, geometry }) => [tpRank, geometry.regions[0]?.numBlocks])).toEqual([
      [0, 64],
      [1, 64],
    ]);
    expect(clock.rttMs).toBe(10);
    expect(clock.offsetMs).toBeCloseTo(100_000, 6);
    expect(incarnation).toBe("i");
  });
});
