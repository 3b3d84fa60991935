// An engine of a fault run in its own process, over NIXL. The parent calls its functions over IPC;
// SIGKILL or a call of `close` ends it.
import type { KvTransferParams } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import type { FaultEngineOrder } from "@kv/testing/faults/fault-fixture";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import type { SimRequest } from "@kv/testing/simulator/sim-options";
import { memoryNetwork, seededRandom } from "@kv/transport-memory";
import { answerCalls } from "./child-calls.js";
import { createFaultInjector } from "./fault-injector.js";
import { faultySideChannel } from "./faulty-side-channel.js";
import { faultyTransport } from "./faulty-transport.js";
import { heldBy } from "./held-resources.js";
import { REAL_CLOCK_TIMEOUTS } from "./timeouts.js";

/** The options of an engine's process: its only argument, as JSON. */
export interface EngineProcessOptions extends Omit<FaultEngineOrder, "connector" | "violation"> {
  readonly connector: "pull" | "push";
  readonly seed: string;
  /**
   * Where its side channel listens. An engine that is restarted listens on the port of its
   * predecessor.
   */
  readonly sideChannelPort: number;
}

/** Besides its answers, the process sends each violated invariant. */
export interface Violation {
  readonly violation?: string;
}

const { connector, seed, layerwise, ...options } = JSON.parse(
  process.argv[2] ?? "{}",
) as EngineProcessOptions;
const network = memoryNetwork();
const { clock } = network.host(options.hostName);
const injector = createFaultInjector(seededRandom(seed));
const transport = faultyTransport(nixlTransport({ backends: ["UCX"] }), {
  clock,
  injector,
  lateMs: REAL_CLOCK_TIMEOUTS.longMs,
});
const engine = await createSimEngine({
  ...options,
  network,
  transport,
  sideChannel: faultySideChannel(zmqSideChannel(), injector),
  connector: connector === "pull" ? pullConnector : pushConnector,
  reportsLayers: layerwise,
  violation: (violation) => void process.send?.({ violation } satisfies Violation),
});

let closed = false;
const functions = {
  address: () => engine.address,
  prefill: (request: SimRequest) => engine.prefill(request),
  async decode(request: SimRequest & { params: KvTransferParams }): Promise<unknown> {
    return engine.decode(request);
  },
  abort: (requestId: string) => engine.abort(requestId),
  outstanding: () => ({ ...engine.outstanding(), transfers: heldBy(transport.agents).transfers }),
  counts: () => injector.counts(),
  stopFaults: () => injector.end(),
  /** Returns what is still held, and ends the process after its answer. */
  async close() {
    await engine.close();
    closed = true;
    setImmediate(() => process.disconnect());
    return heldBy(transport.agents);
  },
};
export type EngineFunctions = typeof functions;

// Runs when the parent is gone.
process.once("disconnect", () => {
  if (!closed) process.exit(1);
});
answerCalls(functions);
