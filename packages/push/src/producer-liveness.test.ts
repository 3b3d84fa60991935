import type { PendingReceive, RemoteEngine } from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { virtualClock } from "@kv/transport-memory";
import { expect, test, vi } from "vitest";
import { ProducerLiveness } from "./producer-liveness.js";
import type { RegistrationOrder } from "./step-metadata.js";

const PREFILL: RemoteEngine["address"] = {
  engineId: "prefill",
  host: "p",
  port: 1,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
};

/**
 * A request that waits for a producer. `answers` are the incarnations that the probes find;
 * undefined: no answer.
 */
function waitingRequest(incarnation: string | undefined, ...answers: (string | undefined)[]) {
  const engine = { incarnation } as RemoteEngine;
  const [drop, fail] = [vi.fn(), vi.fn()];
  const order = { requestId: "r-1", remote: PREFILL } as RegistrationOrder;
  const queryLease = vi.fn(async () => {
    const answer = answers.shift();
    if (answer === undefined) throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer");
    return { incarnation: answer, held: false };
  });
  const receive = { order, fail, engine } as unknown as PendingReceive<RegistrationOrder>;
  const liveness = new ProducerLiveness({
    clock: virtualClock(),
    engines: { peek: () => engine, drop, queryLease },
    receives: { values: () => [receive] },
    probeTimeoutMs: 1000,
  });
  /**
   * Fails `count` more heartbeats. Returns the messages of all errors that the request has got so
   * far.
   */
  const afterFailedHeartbeats = async (count: number) => {
    for (let beat = 0; beat < count; beat++) await liveness.heartbeatFailed(PREFILL);
    expect(drop).toHaveBeenCalledTimes(fail.mock.calls.length);
    return fail.mock.calls.map(([error]) => (error as Error).message);
  };
  return { liveness, queryLease, receive, afterFailedHeartbeats };
}

const SUFFIX = "before it wrote the KV of request r-1";

test("a request goes on waiting while probes find the same incarnation", async () => {
  const { afterFailedHeartbeats, queryLease } = waitingRequest("one", "one", "one", "one");
  expect(await afterFailedHeartbeats(3)).toEqual([]);
  expect(queryLease).toHaveBeenCalledTimes(3);
});

test("a new incarnation fails the request at once, a missed probe the second time", async () => {
  const restarted = waitingRequest("one", "two");
  expect(await restarted.afterFailedHeartbeats(1)).toEqual([
    `engine prefill was restarted ${SUFFIX}`,
  ]);
  const silent = waitingRequest("one");
  expect(await silent.afterFailedHeartbeats(1)).toEqual([]);
  expect(await silent.afterFailedHeartbeats(1)).toEqual([
    `engine prefill stopped answering ${SUFFIX}`,
  ]);
});

test("a vLLM producer is not probed, because its listener would stop: two failed heartbeats in a row fail the request", async () => {
  const { afterFailedHeartbeats, liveness, queryLease } = waitingRequest(undefined);
  expect(await afterFailedHeartbeats(1)).toEqual([]);
  liveness.heartbeatDelivered(PREFILL);
  expect(await afterFailedHeartbeats(1)).toEqual([]);
  expect(await afterFailedHeartbeats(1)).toEqual([
    `engine prefill stopped receiving heartbeats ${SUFFIX}`,
  ]);
  expect(queryLease).not.toHaveBeenCalled();
});

test("a request that still opens the engine does not fail with the one of before", async () => {
  const { afterFailedHeartbeats, receive, queryLease } = waitingRequest("one", "two");
  receive.engine = undefined;
  expect(await afterFailedHeartbeats(2)).toEqual([]);
  expect(queryLease).not.toHaveBeenCalled();
});
