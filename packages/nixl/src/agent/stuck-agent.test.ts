import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { type NativeAddon, type NativeEvent, SETTLED } from "../addon/native.js";
import { startNixlAgent } from "./agent.js";

/**
 * nixl.md N1: `close({ timeoutMs })` did not return while the agent's thread was in a call of NIXL.
 */
test("N1: an agent whose thread does not return is given up: close resolves, its calls and transfers reject, and it is reported", async () => {
  const clock = manualClock();
  const logged: string[] = [];
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
  const agent = await startNixlAgent({
    addon: { Agent: StuckAgent } as unknown as NativeAddon,
    libraryPath: "/x",
    name: "stuck",
    backends: [],
    preload: [],
    captureTelemetry: false,
    ambient: {
      clock,
      log: { debug() {}, info() {}, warn() {}, error: (event: string) => logged.push(event) },
      metrics: { count() {} },
    } as never,
    prepareBackends: async () => [],
    explainBackendError: async (error: unknown) => error,
    checkMetadata: undefined,
    explainRefusedPeer: async (error: unknown) => error,
    onClose() {},
  });
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
  await expect(call).rejects.toMatchObject({ code: "KV_AGENT_CLOSED" });
  expect(logged).toEqual(["nixl-agent-stuck"]);
  expect(detached).toBe(1);
  expect(clock.pending()).toBe(0);
});
