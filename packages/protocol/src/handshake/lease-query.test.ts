import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { encodeMsgpack as encode } from "../encoding/messages.js";
import {
  decodeLeaseQuery,
  decodeLeaseReply,
  encodeLeaseQuery,
  encodeLeaseReply,
} from "./lease-query.js";

const query = { engineId: "p0", requestId: "cmpl-1", generation: 7 };

describe("lease queries", () => {
  it("query and reply decode to what was encoded", () => {
    expect(decodeLeaseQuery([encodeLeaseQuery(query)])).toEqual(query);
    const open = { ...query, generation: undefined };
    expect(decodeLeaseQuery([encodeLeaseQuery(open)])).toEqual(open);
    const answer = { incarnation: "i", held: false };
    expect(decodeLeaseReply([encodeLeaseReply(answer)])).toEqual(answer);
    const registered = { ...answer, registrationGeneration: 3 };
    expect(decodeLeaseReply([encodeLeaseReply(registered)])).toEqual(registered);
    // A number that counts nothing.
    const odd = encodeLeaseReply({ ...answer, registrationGeneration: Number.POSITIVE_INFINITY });
    expect(decodeLeaseReply([odd])).toEqual(answer);
  });

  it("a frame that is not a lease query decodes to undefined", () => {
    const wrong = [
      encode({ kv: "lease_check", engine_id: "", request_id: "r" }),
      encode({ kv: "lease_check", engine_id: "p", request_id: 5 }),
      encode({ kv: "lease_check", engine_id: "p", request_id: "r", generation: 1.5 }),
      encode({ kv: "other", engine_id: "p", request_id: "r" }),
      encode(["get_meta_msg", 0, 0]),
      encode({ kv: "lease_check", engine_id: "p", request_id: "x".repeat(5000) }),
    ];
    for (const frame of wrong) expect(decodeLeaseQuery([frame])).toBeUndefined();
    const good = encodeLeaseQuery(query);
    expect(decodeLeaseQuery([])).toBeUndefined();
    expect(decodeLeaseQuery([good, good])).toBeUndefined();
    fc.assert(
      fc.property(fc.array(fc.uint8Array({ maxLength: 64 }), { maxLength: 3 }), (frames) => {
        decodeLeaseQuery(frames);
        decodeLeaseReply(frames);
      }),
    );
  });
});
