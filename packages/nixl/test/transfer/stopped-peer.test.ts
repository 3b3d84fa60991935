import { describe, expect, test } from "vitest";
import { BOTH_BACKENDS } from "../support/both-backends.js";
import { runChild } from "../support/run-child.js";

const UNTIL_THEN = {
  first: "done",
  timed: "KV_TRANSFER_TIMEOUT",
  aborted: "KV_TRANSFER_ABORTED",
  releasedWhileStopped: 0,
  listClosedWhileStopped: false,
  registrationWhileStopped: "KV_MEMORY_IN_USE",
};

for (const { backend, missing } of BOTH_BACKENDS) {
  describe.skipIf(missing)(
    `a peer that stops answering, over ${backend} (${missing ?? "found"})`,
    () => {
      const env = { NIXL_BACKEND: backend };

      test("transfers reject at once; their memory is released when the peer continues", async () => {
        const { code, stdout, stderr } = await runChild("stopped-peer.ts", ["resume"], { env });
        expect(code, stderr).toBe(0);
        expect(JSON.parse(stdout)).toEqual({ ...UNTIL_THEN, notification: "marker", owner: 0 });
      });

      test("the agent closes after its timeout, and everything is released", async () => {
        const { code, stdout, stderr } = await runChild("stopped-peer.ts", ["close"], { env });
        expect(code, stderr).toBe(0);
        expect(JSON.parse(stdout)).toEqual({ ...UNTIL_THEN, inFlight: 0 });
      });
    },
  );
}
