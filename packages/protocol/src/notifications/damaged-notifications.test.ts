import { KvError } from "@kv/interface";
import fc from "fast-check";
import { expect, it } from "vitest";
import { decodeNotification, decodePushRegistration, encodeNotification } from "../index.js";

// `npm run test:long` makes it a million.
const COUNT = Number(process.env.KV_MUTATIONS ?? 4000);

const SOUND = [
  encodeNotification({ kind: "done", requestId: "cmpl-1-0badcafe", readers: 4 }),
  encodeNotification({ kind: "heartbeat", requestIds: ["cmpl-1", "cmpl-2-0badcafe", "ä"] }),
  encodeNotification({
    kind: "push-registration",
    registration: { request_id: "a", local_block_ids: [[1, 2, 3]] },
  }),
  encodeNotification({ kind: "extension", message: { type: "failed", requestId: "a", why: "b" } }),
];
const damaged = fc
  .tuple(
    fc.constantFrom(...SOUND),
    fc.array(fc.tuple(fc.nat(200), fc.nat(255), fc.constantFrom("set", "cut", "insert", "end")), {
      minLength: 1,
      maxLength: 4,
    }),
  )
  .map(([bytes, changes]) => {
    let now = [...bytes];
    for (const [at, byte, how] of changes) {
      const place = at % Math.max(1, now.length);
      if (how === "set") now[place] = byte;
      else if (how === "cut") now.splice(place, 1 + (byte % 8));
      else if (how === "insert") now.splice(place, 0, byte);
      else now = now.slice(0, place);
    }
    return Uint8Array.from(now);
  });

it("a damaged notification decodes to a known kind or throws a KvError", {
  timeout: 14_400_000,
}, () => {
  fc.assert(
    fc.property(fc.oneof(damaged, fc.uint8Array({ maxLength: 64 })), (bytes) => {
      try {
        const read = decodeNotification(bytes);
        expect(["done", "heartbeat", "push-registration", "extension"]).toContain(read.kind);
        if (read.kind === "push-registration") decodePushRegistration(read.registration);
      } catch (error) {
        expect(KvError.is(error), String(error)).toBe(true);
      }
    }),
    { numRuns: COUNT },
  );
});
