import { KvError, systemClock } from "@kv/interface";
import { describe, expect, test } from "vitest";
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
        if (metadata[0] === 0) throw new KvError("KV_AGENT_METADATA_INVALID", "refused");
        if (metadata[0] !== 1) return;
        onEnd();
        throw new KvError("KV_AGENT_METADATA_INVALID", "died");
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
      await expect(checker.check(Uint8Array.of(first))).rejects.toMatchObject({
        code: "KV_AGENT_METADATA_INVALID",
      });
    }
    await checker.check(Uint8Array.of(2));
    expect(asked).toEqual([[0], [0], [1], [1], [2]]);
    expect(started()).toBe(3);
    await checker.close();
    await checker.check(Uint8Array.of(2));
    await expect(checker.check(Uint8Array.of(3))).rejects.toMatchObject({
      code: "KV_TRANSPORT_CLOSED",
    });
  });

  test("a process that does not get ready in time is killed, and the next check starts another one", async () => {
    const timers: { run: () => void; delayMs: number }[] = [];
    const clock = {
      now: () => 0,
      setTimer(run: () => void, delayMs: number) {
        timers.push({ run, delayMs });
        return { cancel() {} };
      },
    };
    let started = 0;
    const startProcess = (onEnd: () => void): CheckerProcess => {
      started++;
      let kill = () => {};
      const ready = new Promise<void>((_resolve, reject) => {
        kill = () => {
          onEnd();
          reject(new KvError("KV_TRANSPORT_UNAVAILABLE", "killed"));
        };
      });
      return { ready, kill, hold: () => () => {}, ask: async () => {}, close: async () => {} };
    };
    const checker = new MetadataChecker({ clock, startProcess });
    for (const count of [1, 2]) {
      const checked = checker.check(Uint8Array.of(7));
      await expect.poll(() => timers.length).toBe(count);
      expect(timers.at(-1)?.delayMs).toBe(30_000);
      timers.at(-1)?.run();
      await expect(checked).rejects.toMatchObject({ code: "KV_TRANSPORT_UNAVAILABLE" });
      expect(started).toBe(count);
    }
  });
});
