import { type Clock, noMetrics, silentLog } from "@kv/interface";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test, vi } from "vitest";
import { refused } from "../../test/support/refused.js";
import { type NativeAddon, type NativeEvent, SETTLED } from "../addon/native.js";
import { startNixlAgent } from "./agent.js";

let detached = 0;
class StuckAgent {
  constructor(
    callId: number,
    _options: unknown,
    onEvents: (events: NativeEvent[], more: boolean) => void,
  ) {
    queueMicrotask(() => onEvents([[SETTLED, callId, undefined, undefined, undefined]], false));
  }
  keepAlive() {}
  localMetadata() {}
  close() {}
  detach() {
    detached += 1;
  }
}
const start = (clock: Clock, log = silentLog) =>
  startNixlAgent({
    addon: { Agent: StuckAgent } as unknown as NativeAddon,
    libraryPath: "/x",
    name: "stuck",
    backends: [],
    preload: [],
    captureTelemetry: false,
    place: "",
    ambient: { clock, log, metrics: noMetrics },
    prepareBackends: async () => [],
    explainBackendError: async (error: unknown) => error,
    checkMetadata: undefined,
    explainRefusedPeer: async (error: unknown) => error,
    onClose() {},
  });

/**
 * nixl.md N1: `close({ timeoutMs })` did not return while the agent's thread was in a call of NIXL.
 */
test("N1: an agent whose thread does not return is given up: close resolves, its calls and transfers reject, and it is reported", async () => {
  const clock = manualClock();
  const { log, events } = recordedLog();
  detached = 0;
  const { agent } = await start(clock, log);
  const call = agent.localMetadata();
  let closed = false;
  const closing = agent.close({ timeoutMs: 1000 }).then(() => {
    closed = true;
  });
  await Promise.resolve();
  clock.advance(5999);
  await new Promise((resolve) => setImmediate(resolve));
  expect(closed).toBe(false);
  clock.advance(1);
  await closing;
  await refused(call, "KV_AGENT_CLOSED");
  expect(events).toMatchObject([{ event: "nixl-agent-stuck" }]);
  expect(detached).toBe(1);
  expect(clock.pending()).toBe(0);
});

test("F1: the timer of close is one that Node waits for, however long the caller's is", async () => {
  for (const timeoutMs of [2 ** 31 - 6000, 2 ** 31 - 1000, 2 ** 40, Number.POSITIVE_INFINITY]) {
    const clock = manualClock();
    const setTimer = vi.spyOn(clock, "setTimer");
    const { agent } = await start(clock);
    void agent.close({ timeoutMs });
    await Promise.resolve();
    const delays = setTimer.mock.calls.map(([, delayMs]) => delayMs);
    expect(delays.every((delayMs) => delayMs <= 2 ** 31 - 1)).toBe(true);
    expect(delays.length).toBe(timeoutMs === Number.POSITIVE_INFINITY ? 0 : 1);
  }
});
