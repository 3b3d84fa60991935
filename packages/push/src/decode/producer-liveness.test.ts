import type { AwaitedRequest, Peers, RemoteLink } from "@kv/connector";
import { expect, test, vi } from "vitest";
import type { RegistrationOrder } from "../step-metadata.js";
import { createSuspicion } from "./producer-liveness.js";

function suspecting(incarnation: string | undefined, ...processes: (string | undefined)[]) {
  const link = { incarnation } as RemoteLink;
  const [drop, fail] = [vi.fn(), vi.fn()];
  const order = { requestId: "r-1", remote: { engineId: "prefill" } } as RegistrationOrder;
  const processAt = vi.fn(async () => processes.shift());
  const suspicion = createSuspicion({
    peers: { peek: () => link, drop } as unknown as Peers<RemoteLink>,
    waiting: () => [{ order, fail } as unknown as AwaitedRequest<RegistrationOrder>],
    processAt,
  });
  /** What a request that waits is told, after so many heartbeats that were not taken. */
  const beaten = async (times: number) => {
    for (let beat = 0; beat < times; beat++) await suspicion.ask("prefill");
    expect(drop).toHaveBeenCalledTimes(fail.mock.calls.length);
    return fail.mock.calls.map(([error]) => (error as Error).message);
  };
  return { suspicion, processAt, beaten };
}

const AFTER = "before it wrote the KV of request r-1";

test("the process that it was is waited for", async () => {
  const { beaten, processAt } = suspecting("one", "one", "one", "one");
  expect(await beaten(3)).toEqual([]);
  expect(processAt).toHaveBeenCalledTimes(3);
});

test("another process in its place is the end at once; nobody, at the second time", async () => {
  expect(await suspecting("one", "two").beaten(1)).toEqual([`engine prefill was restarted ${AFTER}`]);
  const { beaten } = suspecting("one");
  expect(await beaten(1)).toEqual([]);
  expect(await beaten(1)).toEqual([`engine prefill does not answer ${AFTER}`]);
});

test("a vLLM producer is never asked: its listener would die of the question", async () => {
  const { beaten, suspicion, processAt } = suspecting(undefined);
  expect(await beaten(1)).toEqual([]);
  suspicion.alive("prefill");
  expect(await beaten(1)).toEqual([]);
  expect(await beaten(1)).toEqual([`engine prefill takes no heartbeat ${AFTER}`]);
  expect(processAt).not.toHaveBeenCalled();
});
