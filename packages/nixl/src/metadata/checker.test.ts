import { KvError, systemClock } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { describe, expect, test } from "vitest";
import { refused } from "../../test/support/refused.js";
import { type CheckerProcess, MetadataChecker } from "./checker.js";

/** Fake processes that refuse metadata beginning with 0, and end when it begins with 1. */
function counted() {
  const asked: number[][] = [];
  let started = 0;
  const start = (onEnd: () => void): CheckerProcess => {
    started++;
    return {
      ready: Promise.resolve(),
      hold: () => () => {},
      async ask(metadata) {
        asked.push([...metadata]);
        if (metadata[0] === 0) throw new KvError("KV_AGENT_METADATA_INVALID", "it is refused");
        if (metadata[0] !== 1) return;
        onEnd();
        throw new KvError("KV_AGENT_METADATA_INVALID", "the process died");
      },
      kill() {},
      async close() {},
    };
  };
  const checker = new MetadataChecker({ clock: systemClock(), startProcess: start });
  return { asked, started: () => started, checker };
}

describe("metadata checked in another process", () => {
  test("the same bytes are checked once, also at the same time and from another buffer", async () => {
    const { asked, started, checker } = counted();
    const bytes = Buffer.of(7, 8);
    await Promise.all([checker.check(bytes), checker.check(Uint8Array.of(7, 8))]);
    await checker.check(Uint8Array.of(7, 8));
    bytes[0] = 9;
    await checker.check(bytes);
    expect(asked).toEqual([
      [7, 8],
      [9, 8],
    ]);
    expect(started()).toBe(1);
  });

  test("refused metadata is checked again, and a process that ended is replaced", async () => {
    const { asked, started, checker } = counted();
    for (const first of [0, 0, 1, 1]) {
      const check = () => checker.check(Uint8Array.of(first));
      await refused(check, "KV_AGENT_METADATA_INVALID");
    }
    await checker.check(Uint8Array.of(2));
    expect(asked).toEqual([[0], [0], [1], [1], [2]]);
    expect(started()).toBe(3);
    await checker.close();
    await checker.check(Uint8Array.of(2));
    await refused(checker.check(Uint8Array.of(3)), "KV_TRANSPORT_CLOSED");
  });

  test("a process that does not get ready in time is killed, and the next check starts another one", async () => {
    const clock = manualClock();
    let started = 0;
    const startProcess = (onEnd: () => void): CheckerProcess => {
      started++;
      let kill = () => {};
      const ready = new Promise<void>((_resolve, reject) => {
        kill = () => {
          onEnd();
          reject(new KvError("KV_TRANSPORT_UNAVAILABLE", "it was killed"));
        };
      });
      return { ready, kill, hold: () => () => {}, ask: async () => {}, close: async () => {} };
    };
    const checker = new MetadataChecker({ clock, startProcess });
    for (const count of [1, 2]) {
      const checked = checker.check(Uint8Array.of(7));
      await expect.poll(clock.pending).toBe(1);
      clock.advance(29_999);
      expect(clock.pending()).toBe(1);
      clock.advance(1);
      await refused(checked, "KV_TRANSPORT_UNAVAILABLE");
      expect(started).toBe(count);
    }
  });
});
