import { KvError, type SideChannel } from "@kv/interface";
import { encodeLeaseReply } from "@kv/protocol";
import { describe, expect, it } from "vitest";
import { queryLease } from "./messages.js";

const query = { engineId: "p0", requestId: "cmpl-1", generation: 7 };

describe("queryLease", () => {
  it("asks at most twice, and not again after an abort", async () => {
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
    expect(await queryLease(query, { ...options, sideChannel: second })).toEqual(answer);
    asked = 0;
    const never = failing(() => undefined);
    await expect(queryLease(query, { ...options, sideChannel: never })).rejects.toMatchObject({
      code: "KV_SIDE_CHANNEL_TIMEOUT",
    });
    expect(asked).toBe(2);
    const garbage = failing(() => [new Uint8Array([1, 2, 3])]);
    await expect(queryLease(query, { ...options, sideChannel: garbage })).rejects.toMatchObject({
      code: "KV_WIRE_MALFORMED",
    });
    asked = 0;
    const signal = AbortSignal.abort();
    await expect(queryLease(query, { ...options, sideChannel: never, signal })).rejects.toThrow();
    expect(asked).toBe(1);
  });
});
