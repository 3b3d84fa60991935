import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { damaged, endsWell } from "../../test/damaged.js";
import { decodeAgentMetadata } from "./agent-metadata.js";
import {
  decodeHandshakePayload,
  decodeHandshakeReply,
  encodeHandshakePayload,
  encodeHandshakeReply,
} from "./handshake.js";
import { checkHandshakeSeal, sealHandshake } from "./handshake-seal.js";

const RANK = { ppRank: 0, tpRank: 1 };
const plain = encodeHandshakePayload({
  compatibilityHash: "ab".repeat(32),
  agentMetadataBytes: new Uint8Array(451).map((_, index) => index * 7),
  extension: {
    version: 1,
    factors: { model: "m", scale: 1.5, whole: 2, none: null },
    incarnation: "me",
  },
  rest: { later: "field" },
});
const outcome = (bytes: Uint8Array, rank = RANK) => {
  try {
    checkHandshakeSeal(decodeHandshakePayload(bytes), rank);
    return "taken";
  } catch (error) {
    return KvError.is(error) ? error.code : String(error);
  }
};
const UNTRUSTED = "KV_HANDSHAKE_UNTRUSTED";

describe("the seal of a handshake", () => {
  it("does not change the payload, and is valid only for its rank", () => {
    const sealed = sealHandshake(plain, RANK);
    const { extension, ...rest } = decodeHandshakePayload(sealed);
    const { extension: before, ...restBefore } = decodeHandshakePayload(plain);
    expect(rest).toEqual(restBefore);
    expect(extension).toEqual({
      ...before,
      seal: { version: 1, length: 451, sha256: expect.stringMatching(/^[0-9a-f]{64}$/) },
    });
    expect(outcome(sealed)).toBe("taken");
    expect(outcome(sealed, { ppRank: 0, tpRank: 0 })).toBe(UNTRUSTED);
    expect(sealHandshake(sealed, RANK)).toEqual(sealed);
  });

  it("a payload of plain vLLM has no seal and passes", () => {
    const agentMetadataBytes = Uint8Array.of(1);
    expect(
      outcome(encodeHandshakePayload({ compatibilityHash: "", agentMetadataBytes, rest: {} })),
    ).toBe("taken");
  });

  it("a payload of our own peers without a valid seal is refused", () => {
    expect(outcome(plain)).toBe("KV_WIRE_MALFORMED");
    const payload = decodeHandshakePayload(plain);
    for (const seal of [
      7,
      [],
      { version: 2 },
      { version: 1, length: 451, sha256: "00" },
      { version: 1, length: 451 },
    ]) {
      expect(outcome(encodeHandshakePayload({ ...payload, extension: { seal } }))).toBe(
        "KV_WIRE_MALFORMED",
      );
    }
  });
});

const RUNS = 3000;

describe("damaged handshakes", () => {
  const sealed = sealHandshake(plain, RANK);
  const meaning = (bytes: Uint8Array) => {
    const { extension: _, ...rest } = decodeHandshakePayload(bytes);
    return rest;
  };

  it("sealed: a payload is refused or equals the one that was sent, unless its extension was lost", () => {
    fc.assert(
      fc.property(damaged(sealed), (bytes) => {
        const result = outcome(bytes);
        if (result !== "taken") {
          expect(result).toMatch(/^KV_/);
          return;
        }
        const payload = decodeHandshakePayload(bytes);
        if (payload.extension !== undefined) expect(meaning(bytes)).toEqual(meaning(sealed));
      }),
      { numRuns: RUNS },
    );
  });

  it("replies and metadata decode or throw a KvError", () => {
    const frames = encodeHandshakeReply(sealed, 12.5);
    fc.assert(
      fc.property(damaged(frames[0]), damaged(frames[1]), (first, second) => {
        endsWell(() => decodeHandshakeReply([first, second]));
        endsWell(() => decodeAgentMetadata(first));
      }),
      { numRuns: RUNS },
    );
  });
});
