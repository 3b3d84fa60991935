import type { AwaitedRequest, Peers, RemoteLink } from "@kv/connector";
import { KvError } from "@kv/interface";
import { virtualClock } from "@kv/transport-memory";
import { expect, test, vi } from "vitest";
import type { RegistrationOrder } from "../step-metadata.js";
import { ProducerLiveness } from "./producer-liveness.js";

/** A request that waits for a producer. `answers` are the incarnations that the probes find; undefined: no answer. */
function waitingRequest(incarnation: string | undefined, ...answers: (string | undefined)[]) {
  const link = { incarnation } as RemoteLink;
  const [drop, fail] = [vi.fn(), vi.fn()];
  const order = { requestId: "r-1", remote: { engineId: "prefill" } } as RegistrationOrder;
  const currentIncarnation = vi.fn(async () => {
    const answer = answers.shift();
    if (answer === undefined) throw new KvError("KV_SIDE_CHANNEL_TIMEOUT", "no answer");
    return answer;
  });
  const liveness = new ProducerLiveness({
    clock: virtualClock(),
    peers: { peek: () => link, drop } as unknown as Peers<RemoteLink>,
    awaited: { values: () => [{ order, fail } as unknown as AwaitedRequest<RegistrationOrder>] },
    probeTimeoutMs: 1000,
    currentIncarnation,
  });
  /** The messages of the errors that the request has got after so many more failed heartbeats. */
  const afterFailedHeartbeats = async (count: number) => {
    for (let beat = 0; beat < count; beat++) await liveness.heartbeatFailed("prefill");
    expect(drop).toHaveBeenCalledTimes(fail.mock.calls.length);
    return fail.mock.calls.map(([error]) => (error as Error).message);
  };
  return { liveness, currentIncarnation, afterFailedHeartbeats };
}

const SUFFIX = "before it wrote the KV of request r-1";

test("a request goes on waiting while probes find the same incarnation", async () => {
  const { afterFailedHeartbeats, currentIncarnation } = waitingRequest("one", "one", "one", "one");
  expect(await afterFailedHeartbeats(3)).toEqual([]);
  expect(currentIncarnation).toHaveBeenCalledTimes(3);
});

test("a new incarnation fails the request at once, a missed probe the second time", async () => {
  const restarted = waitingRequest("one", "two");
  expect(await restarted.afterFailedHeartbeats(1)).toEqual([`engine prefill was restarted ${SUFFIX}`]);
  const silent = waitingRequest("one");
  expect(await silent.afterFailedHeartbeats(1)).toEqual([]);
  expect(await silent.afterFailedHeartbeats(1)).toEqual([`engine prefill does not answer ${SUFFIX}`]);
});

test("a vLLM producer is not probed, because its listener would stop: two failed heartbeats in a row decide", async () => {
  const { afterFailedHeartbeats, liveness, currentIncarnation } = waitingRequest(undefined);
  expect(await afterFailedHeartbeats(1)).toEqual([]);
  liveness.heartbeatDelivered("prefill");
  expect(await afterFailedHeartbeats(1)).toEqual([]);
  expect(await afterFailedHeartbeats(1)).toEqual([`engine prefill takes no heartbeat ${SUFFIX}`]);
  expect(currentIncarnation).not.toHaveBeenCalled();
});
