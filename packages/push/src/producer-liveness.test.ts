import type { PendingReceive, RemoteEngine } from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import type { LeaseReply } from "@kv/protocol";
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

type Answer = string | Pick<LeaseReply, "incarnation" | "registrationGeneration"> | undefined;

/**
 * A request that waits for a producer. `answers` are the incarnations that the probes find;
 * undefined: no answer.
 */
function waitingRequest(incarnation: string | undefined, ...answers: Answer[]) {
  const engine = { incarnation } as RemoteEngine;
  const [drop, fail] = [vi.fn(), vi.fn()];
  const order = { requestId: "r-1", remote: PREFILL } as RegistrationOrder;
  const queryLease = vi.fn(async () => {
    const answer = answers.shift();
    if (answer === undefined) throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer");
    return { held: false, ...(typeof answer === "string" ? { incarnation: answer } : answer) };
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

test.each<[string, Answer]>([
  ["was restarted", "two"],
  ["registered its KV caches again", { incarnation: "one", registrationGeneration: 1 }],
])("an engine that %s fails the request at once", async (what, answer) => {
  const { afterFailedHeartbeats } = waitingRequest("one", answer);
  expect(await afterFailedHeartbeats(1)).toEqual([`engine prefill ${what} ${SUFFIX}`]);
});

test("a missed probe fails the request the second time", async () => {
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
