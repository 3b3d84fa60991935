import fc from "fast-check";
import { it } from "vitest";
import { damaged, endsWell } from "../../test/damaged.js";
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

it("a damaged notification decodes to a known kind or throws a KvError", {
  timeout: 14_400_000,
}, () => {
  fc.assert(
    fc.property(fc.oneof(damaged(...SOUND), fc.uint8Array({ maxLength: 64 })), (bytes) =>
      endsWell(() => {
        const read = decodeNotification(bytes);
        if (read.kind === "push-registration") decodePushRegistration(read.registration);
        else if (!["done", "heartbeat", "extension"].includes(read.kind))
          throw new Error(`the kind is ${read.kind}`);
      }),
    ),
    { numRuns: COUNT },
  );
});
