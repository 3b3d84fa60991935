import { type LogFields, type SideChannel, silentLog } from "@kv/interface";
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
import { simConfig } from "@kv/testing/simulator/sim-config";
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
  const relaxed: LogFields[] = [];
  const warn = (_: string, fields: LogFields = {}) => void relaxed.push(fields);
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
    log: { ...silentLog, warn },
  });
  const { extension } = decodeHandshakePayload(handshake.payload(new Uint8Array()));
  const own = extension?.["factors"] as CompatibilityFactors;
  const ask = (tpRanks: readonly number[], change: Partial<EngineAddress> = {}) =>
    handshake.ask({ ...address, ...change }, tpRanks);
  return { asked, relaxed, own, ask };
}

const BFLOAT16 = { dtype: "torch.bfloat16" };
const RELAXED = { enforce_handshake_compat: false };

async function expectRefused(peer: Peer, code: string, message: RegExp = /./) {
  const answer = asking(peer).ask([0]);
  const error = await answer.then(
    ({ refused }) => refused?.error,
    (thrown: unknown) => thrown,
  );
  expect(error).toMatchObject({ code, message: expect.stringMatching(message) as string });
}

describe("a handshake", () => {
  it("accepts only a payload that is sealed for the requested rank", async () => {
    await expectRefused({ tellsFactors: true, sealsForRank: 1 }, "KV_HANDSHAKE_UNTRUSTED");
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

  it("names the compatibility factor that differs before it decodes the metadata", async () => {
    const malformed = { ...BFLOAT16, agentMetadataBytes: new Uint8Array([0xc1]) };
    const differs = "KV_HANDSHAKE_INCOMPATIBLE";
    for (const tellsFactors of [true, false])
      await expectRefused({ ...BFLOAT16, tellsFactors }, differs, /dtype.*float32.*bfloat16/);
    await expectRefused(malformed, differs);
    await expectRefused({ ...malformed, extra: RELAXED }, "KV_WIRE_MALFORMED");
  });

  it("accepts a different compatibility hash only when it is not enforced, and reports the differences", async () => {
    await expectRefused(BFLOAT16, "KV_HANDSHAKE_INCOMPATIBLE");
    const lax = asking({ ...BFLOAT16, extra: RELAXED });
    expect((await lax.ask([0, 1])).ranks).toHaveLength(2);
    const differences = [{ factor: "dtype", ours: "torch.float32", theirs: "torch.bfloat16" }];
    expect(lax.relaxed).toMatchObject([{ differences }]);
    const equal = asking({ extra: RELAXED });
    await equal.ask([0]);
    expect(equal.relaxed).toEqual([]);
  });

  it("refuses a reply of another engine, and names both engine ids", () =>
    expectRefused({ engineId: "stranger" }, "KV_HANDSHAKE_WRONG_ENGINE", /stranger.*p0/));

  it("reports a peer's refusal with its reason, and a malformed reply as KV_WIRE_MALFORMED", async () => {
    const frames = [encodeHandshakeRefusal("no such rank")];
    await expectRefused({ frames }, "KV_HANDSHAKE_REFUSED", /no such rank/);
    const empty = new Uint8Array(0);
    for (const malformed of [[], [new Uint8Array([0xc1])], [empty, empty]])
      await expectRefused({ frames: malformed }, "KV_WIRE_MALFORMED");
    await expectRefused({ clockSeconds: () => Number.NaN }, "KV_WIRE_MALFORMED");
  });

  it("refuses a peer of an older version, whose reply has no clock", () => {
    const agentMetadataBytes = metadataBytes("p0");
    const hash = compatibilityHash(asking({}).own);
    const payload = { compatibilityHash: hash, agentMetadataBytes, rest: {} };
    const frames = [encodeHandshakePayload(payload)];
    return expectRefused({ frames }, "KV_HANDSHAKE_INCOMPATIBLE", /version/);
  });
});
