import { KvError, type SideChannel } from "@kv/interface";
import {
  decodeLeaseQuery,
  decodeLeaseReply,
  encodeMsgpack as encode,
  encodeLeaseQuery,
  encodeLeaseReply,
} from "@kv/protocol";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { askLease } from "./lease-query.js";

const question = { engineId: "p0", requestId: "cmpl-1", generation: 7 };

describe("leases-check", () => {
  it("goes through the wire and back", () => {
    expect(decodeLeaseQuery([encodeLeaseQuery(question)])).toEqual(question);
    const open = { ...question, generation: undefined };
    expect(decodeLeaseQuery([encodeLeaseQuery(open)])).toEqual(open);
    const answer = { incarnation: "i", held: false };
    expect(decodeLeaseReply([encodeLeaseReply(answer)])).toEqual(answer);
  });

  it("is nothing when it is anything else", () => {
    const wrong = [
      encode({ kv: "lease_check", engine_id: "", request_id: "r" }),
      encode({ kv: "lease_check", engine_id: "p", request_id: 5 }),
      encode({ kv: "lease_check", engine_id: "p", request_id: "r", generation: 1.5 }),
      encode({ kv: "other", engine_id: "p", request_id: "r" }),
      encode(["get_meta_msg", 0, 0]),
      encode({ kv: "lease_check", engine_id: "p", request_id: "x".repeat(5000) }),
    ];
    for (const frame of wrong) expect(decodeLeaseQuery([frame])).toBeUndefined();
    const good = encodeLeaseQuery(question);
    expect(decodeLeaseQuery([])).toBeUndefined();
    expect(decodeLeaseQuery([good, good])).toBeUndefined();
    fc.assert(
      fc.property(fc.array(fc.uint8Array({ maxLength: 64 }), { maxLength: 3 }), (frames) => {
        decodeLeaseQuery(frames);
        decodeLeaseReply(frames);
      }),
    );
  });

  it("asks twice at most, and not once more when given up", async () => {
    let asked = 0;
    const failing = (frames: (n: number) => Uint8Array[] | undefined): SideChannel =>
      ({
        async request() {
          asked += 1;
          const reply = frames(asked);
          if (reply === undefined) throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", "lost");
          return { frames: reply, sentAtMs: 0, receivedAtMs: 0 };
        },
      }) as unknown as SideChannel;
    const options = { host: "p", port: 1, timeoutMs: 10 };
    const answer = { incarnation: "i", held: true };
    const second = failing((n) => (n === 2 ? [encodeLeaseReply(answer)] : undefined));
    expect(await askLease(question, { ...options, sideChannel: second })).toEqual(answer);
    asked = 0;
    const never = failing(() => undefined);
    await expect(askLease(question, { ...options, sideChannel: never })).rejects.toMatchObject({
      code: "KV_SIDE_CHANNEL_TIMEOUT",
    });
    expect(asked).toBe(2);
    const garbage = failing(() => [new Uint8Array([1, 2, 3])]);
    await expect(askLease(question, { ...options, sideChannel: garbage })).rejects.toMatchObject({
      code: "KV_WIRE_MALFORMED",
    });
    asked = 0;
    const signal = AbortSignal.abort();
    await expect(askLease(question, { ...options, sideChannel: never, signal })).rejects.toThrow();
    expect(asked).toBe(1);
  });
});
