import { randomBytes } from "node:crypto";
import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { frameMetadata, unframeMetadata } from "./frame.js";

const key = new Uint8Array(32).fill(7);
const metadata = new Uint8Array(451).map((_, index) => index);
const refusal = (act: () => unknown) => {
  try {
    act();
  } catch (error) {
    return KvError.is(error, "KV_AGENT_METADATA_INVALID") ? error.message : String(error);
  }
  return "accepted";
};

describe("framed metadata", () => {
  test("survives framing, with and without a key", () => {
    expect(unframeMetadata(frameMetadata(metadata))).toEqual(metadata);
    expect(unframeMetadata(frameMetadata(metadata, { key }), { key })).toEqual(metadata);
  });

  test("refuses a change of any byte, and another length", () => {
    for (const options of [{}, { key }]) {
      const frame = frameMetadata(metadata, options);
      for (let at = 0; at < frame.length; at++) {
        const changed = frame.slice();
        changed[at] = (changed[at] ?? 0) ^ (1 << (at % 8));
        expect(
          refusal(() => unframeMetadata(changed, options)),
          `byte ${at}`,
        ).not.toBe("accepted");
        expect(refusal(() => unframeMetadata(frame.subarray(0, at), options))).not.toBe("accepted");
      }
      expect(refusal(() => unframeMetadata(Buffer.concat([frame, Uint8Array.of(0)]), options))).toContain(
        "announces",
      );
    }
  });

  test("a key must be the same on both sides, and long enough", () => {
    const keyed = frameMetadata(metadata, { key });
    expect(refusal(() => unframeMetadata(keyed))).toContain("has no key");
    expect(refusal(() => unframeMetadata(frameMetadata(metadata), { key }))).toContain("not signed");
    expect(refusal(() => unframeMetadata(keyed, { key: randomBytes(32) }))).toContain("another key");
    expect(refusal(() => frameMetadata(metadata, { key: new Uint8Array(15) }))).toContain("15 bytes");
    expect(refusal(() => frameMetadata(new Uint8Array(0)))).toContain("0 bytes");
  });

  test("arbitrary bytes are refused", () => {
    fc.assert(
      fc.property(fc.uint8Array({ maxLength: 200 }), (bytes) => {
        expect(refusal(() => unframeMetadata(bytes))).not.toBe("accepted");
      }),
    );
  });
});
