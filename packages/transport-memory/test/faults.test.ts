import { KvError } from "@kv/interface";
import { type FaultRule, memoryNetwork } from "@kv/transport-memory";
import { expect, test } from "vitest";
import {
  ALL,
  bytes,
  codeOf,
  collect,
  count,
  NUM_BLOCKS,
  pair,
  readAll,
  SLOW,
  TOTAL,
} from "./pair.js";

test("bytes land over time, with the configured bandwidth and pieces", async () => {
  const p = await pair({ latency: SLOW });
  const { done } = p.reader.agent.transfer(readAll(p));
  const landed: number[] = [];
  for (const ms of [9, 5, 4, 4, 4]) {
    await p.clock.advance(ms);
    landed.push(count(p.reader.memory, 2));
  }
  // 10 ms of latency, then a quarter of 4096 bytes every 4 ms.
  expect(landed).toEqual([0, TOTAL / 4, TOTAL / 2, (3 * TOTAL) / 4, TOTAL]);
  expect(await done).toMatchObject({ lengthBytes: TOTAL, transferMs: 26 });
});

test("transfers in one direction share the bandwidth when that is set, and each byte range adds its time", async () => {
  const scattered = Int32Array.from(ALL, (id) => (id * 5) % NUM_BLOCKS);
  const times = async (sharesBandwidth: boolean) => {
    const p = await pair({ latency: { ...SLOW, sharesBandwidth, rangeMs: 0.5 } });
    const [first, second, other] = [
      {},
      { localIds: scattered },
      { operation: "WRITE" } as const,
    ].map((more) => p.reader.agent.transfer(readAll(p, more)).done);
    await p.clock.advance(100);
    return (await Promise.all([first, second, other])).map((result) => result?.transferMs);
  };
  // 10 ms of latency, 16 ms for the bytes, 0.5 ms for one range or 8 ms for 16.
  expect(await times(false)).toEqual([26.5, 34, 26.5]);
  // The pieces of both READs follow one another on one direction of the link, and the WRITE has the
  // other one.
  const [first = 0, second = 0, other] = await times(true);
  expect([Math.max(first, second), other]).toEqual([42.5, 26.5]);
});

test("an aborted transfer keeps writing until it is released, and not afterwards", async () => {
  const p = await pair({ latency: SLOW });
  const controller = new AbortController();
  const words = collect(p.owner.agent);
  const { done, released } = p.reader.agent.transfer(
    readAll(p, { signal: controller.signal, notification: bytes("never") }),
  );
  let free = false;
  void released.then(() => {
    free = true;
  });
  await p.clock.advance(14);
  controller.abort();
  expect(await codeOf(done)).toBe("KV_TRANSFER_ABORTED");
  // Memory that is reused now is overwritten.
  p.reader.memory.bytes.fill(9);
  await p.clock.advance(4.9);
  expect(free).toBe(false);
  expect(count(p.reader.memory, 2)).toBe(TOTAL / 4);
  await p.clock.advance(0.2);
  expect(free).toBe(true);
  expect(count(p.reader.memory, 2)).toBe(TOTAL / 2);
  p.reader.memory.bytes.fill(9);
  await p.clock.runUntilIdle();
  expect(count(p.reader.memory, 9)).toBe(TOTAL);
  expect(words).toEqual([]);
});

test("drop: the transfer ends at its deadline only, and its memory is released a little later", async () => {
  const p = await pair({ latency: SLOW, faults: [{ operation: "READ", nth: 2, fault: "drop" }] });
  await p.clock.settle(p.reader.agent.transfer(readAll(p)).done);
  const { done, released } = p.reader.agent.transfer(readAll(p, { timeoutMs: 5000 }));
  const beganMs = p.clock.now();
  let freeAtMs = 0;
  void released.then(() => {
    freeAtMs = p.clock.now();
  });
  expect(await p.clock.settle(codeOf(done))).toBe("KV_TRANSFER_TIMEOUT");
  expect(p.clock.now() - beganMs).toBe(5000);
  await p.clock.settle(released);
  expect(freeAtMs - beganMs).toBe(5005);
  expect(p.network.faultCounts()).toEqual({ drop: 1 });
  expect(p.network.outstanding().transfers).toBe(0);
});

test("fail: the n-th transfer fails with the configured code after part of its bytes landed, without its notification", async () => {
  const rule: FaultRule = {
    operation: "READ",
    nth: 1,
    fault: "fail",
    code: "KV_PEER_DISCONNECTED",
  };
  const p = await pair({ latency: SLOW, faults: [rule] });
  const words = collect(p.owner.agent);
  const { done, released } = p.reader.agent.transfer(readAll(p, { notification: bytes("first") }));
  expect(await p.clock.settle(codeOf(done))).toBe("KV_PEER_DISCONNECTED");
  await p.clock.settle(released);
  expect(count(p.reader.memory, 2)).toBeLessThan(TOTAL + 1);
  await p.clock.settle(p.reader.agent.transfer(readAll(p, { notification: bytes("second") })).done);
  await p.clock.runUntilIdle();
  expect(words).toEqual(["second"]);
});

test("delay: the transfer takes delayMs longer", async () => {
  const p = await pair({
    latency: SLOW,
    faults: [{ operation: "READ", fault: "delay", delayMs: 100 }],
  });
  expect(await p.clock.settle(p.reader.agent.transfer(readAll(p)).done)).toMatchObject({
    transferMs: 126,
  });
});

test("notifications: drop, duplicate, delay (also of later ones), reorder", async () => {
  const p = await pair({
    latency: { latencyMs: 1 },
    faults: [
      { fault: "drop", nth: 2, operation: "NOTIFY" },
      { fault: "duplicate", nth: 2 },
      { fault: "delay", nth: 2, operation: "NOTIFY", delayMs: 50 },
      { fault: "reorder", nth: 2, delayMs: 100 },
    ],
  });
  const words = collect(p.owner.agent);
  // Each rule counts the operations that earlier rules did not match: "b" is dropped, "c"
  // duplicated, "d" delayed, "e" overtaken.
  for (const word of ["a", "b", "c", "d", "e", "f"]) await p.notify(word);
  await p.clock.advance(1);
  expect(words).toEqual(["a", "c", "c"]);
  await p.clock.runUntilIdle();
  expect(words).toEqual(["a", "c", "c", "d", "f", "e"]);
  expect(p.network.faultCounts()).toEqual({ drop: 1, duplicate: 1, delay: 1, reorder: 1 });
});

test("disconnect: transfers in flight fail and new ones fail, until forMs has passed", async () => {
  const p = await pair({
    latency: SLOW,
    faults: [{ operation: "NOTIFY", nth: 1, fault: "disconnect", forMs: 1000 }],
  });
  const inFlight = p.reader.agent.transfer(readAll(p));
  await p.clock.advance(15);
  expect(await codeOf(p.owner.agent.addRemote(await p.reader.agent.localMetadata()))).toBe("KV_OK");
  expect(await codeOf(p.owner.agent.notify(p.reader.agent.name, bytes("x")))).toBe(
    "KV_NOTIFICATION_FAILED",
  );
  expect(await codeOf(inFlight.done)).toBe("KV_PEER_DISCONNECTED");
  await inFlight.released;
  expect(await codeOf(p.reader.agent.transfer(readAll(p)).done)).toBe("KV_PEER_DISCONNECTED");
  await p.clock.advance(1000);
  expect(await p.clock.settle(codeOf(p.reader.agent.transfer(readAll(p)).done))).toBe("KV_OK");
  p.network.disconnect("p", "d");
  expect(await codeOf(p.notify("x"))).toBe("KV_NOTIFICATION_FAILED");
  p.network.reconnect("d", "p");
  await p.notify("x");
});

test("a transfer whose notification cannot be sent fails", async () => {
  const p = await pair({ faults: [{ operation: "NOTIFY", fault: "fail" }] });
  const { done } = p.reader.agent.transfer(readAll(p, { notification: bytes("x") }));
  expect(await p.clock.settle(codeOf(done))).toBe("KV_NOTIFICATION_FAILED");
});

test("rules match by host, agent and predicate, and stop after `times` faults", async () => {
  const p = await pair({
    faults: [
      { fault: "drop", operation: "NOTIFY", from: "p" },
      { fault: "drop", operation: "NOTIFY", to: "nobody" },
      {
        fault: "drop",
        operation: "NOTIFY",
        to: "agent of p",
        where: ({ payload }) => payload?.[0] === 0x48,
        times: 1,
      },
    ],
  });
  const words = collect(p.owner.agent);
  for (const word of ["Ha", "x", "Hb"]) await p.notify(word);
  await p.clock.runUntilIdle();
  expect(words).toEqual(["x", "Hb"]);
});

test("the same seed gives the same faults, and another seed gives others", async () => {
  const run = async (seed: number): Promise<string> => {
    const p = await pair({
      seed,
      latency: { jitterMs: 5 },
      faults: [{ fault: "drop", operation: "NOTIFY", probability: 0.3 }],
    });
    const words = collect(p.owner.agent);
    for (let index = 0; index < 50; index++) await p.notify(String(index));
    await p.clock.runUntilIdle();
    return `${words.join()} at ${p.clock.now()}`;
  };
  expect(await run(7)).toBe(await run(7));
  expect(await run(7)).not.toBe(await run(8));
});

test("invalid rules are rejected", () => {
  const wrong: unknown[] = [
    { fault: "explode" },
    { fault: "duplicate", operation: "READ" },
    { fault: "garbage", operation: ["REQUEST", "NOTIFY"] },
    { fault: "drop", probability: 1.5 },
    { fault: "drop", nth: 0 },
    { fault: "drop", times: 0.5 },
    { fault: "delay", delayMs: -1 },
    { fault: "disconnect", forMs: Number.NaN },
  ];
  for (const rule of wrong) {
    expect(() => memoryNetwork({ faults: [rule as FaultRule] })).toThrow(KvError);
  }
  expect(() => memoryNetwork({ latency: { lingerMs: -1 } })).toThrow("lingerMs is -1");
});
