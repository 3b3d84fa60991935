import { describe, expect, test } from "vitest";
import { nixlMissing } from "./require-nixl.js";
import { runChild } from "./run-child.js";

const UNTIL_THEN = {
  first: "done",
  timed: "KV_TRANSFER_TIMEOUT",
  aborted: "KV_TRANSFER_ABORTED",
  releasedWhileStopped: 0,
  listClosedWhileStopped: false,
  registrationWhileStopped: "KV_MEMORY_IN_USE",
};

describe.skipIf(nixlMissing)(`a peer that stops answering (${nixlMissing ?? "found"})`, () => {
  test("transfers are given up at once, their memory only when the peer has gone on", async () => {
    const { code, stdout, stderr } = await runChild("stopped-peer.ts", ["resume"]);
    expect(code, stderr).toBe(0);
    expect(JSON.parse(stdout)).toEqual({ ...UNTIL_THEN, notification: "marker", owner: 0 });
  });

  test("the agent closes when its patience is over, and everything is released", async () => {
    const { code, stdout, stderr } = await runChild("stopped-peer.ts", ["close"]);
    expect(code, stderr).toBe(0);
    expect(JSON.parse(stdout)).toEqual({ ...UNTIL_THEN, inFlight: 0 });
  });
});
