// The parent calls functions of this engine over IPC; SIGKILL or `close` ends it.
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import type { FaultEngine, FaultEngineOrder } from "@kv/testing/faults/fault-fixture";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import { memoryNetwork, seededRandom } from "@kv/transport-memory";
import { createBirpc } from "birpc";
import { FaultInjector, faultySideChannel, faultyTransport } from "./faulty.js";
import { heldBy } from "./held-resources.js";

export interface EngineProcessOptions extends Omit<FaultEngineOrder, "connector" | "violation"> {
  readonly connector: "pull" | "push";
  readonly seed: string;
  /** An engine that is restarted listens on the port of its predecessor. */
  readonly sideChannelPort: number;
  readonly lateMs: number;
}

export interface ParentFunctions {
  violation(what: string): void;
}

const options = JSON.parse(process.argv[2] ?? "{}") as EngineProcessOptions;
const { connector, seed, layerwise, lateMs, ...order } = options;
const network = memoryNetwork();
const { clock } = network.host(options.hostName);
const injector = new FaultInjector(seededRandom(seed));
const nixl = nixlTransport({ backends: ["UCX"] });
const transport = faultyTransport(nixl, { clock, injector, lateMs });
const engine = await createSimEngine({
  ...order,
  network,
  transport,
  sideChannel: faultySideChannel(zmqSideChannel(), injector),
  connector: connector === "pull" ? pullConnector : pushConnector,
  reportsLayers: layerwise,
  violation: (what) => void parent.violation.asEvent(what),
});

let closed = false;
const functions = {
  address: () => engine.address,
  prefill: engine.prefill,
  decode: engine.decode as FaultEngine["decode"],
  abort: (requestId: string) => engine.abort(requestId),
  outstanding: () => ({ ...engine.outstanding(), transfers: heldBy(transport.agents).transfers }),
  counts: () => injector.counts,
  stopFaults() {
    injector.hasEnded = true;
  },
  async close() {
    await engine.close();
    closed = true;
    setImmediate(() => process.disconnect());
    return heldBy(transport.agents);
  },
};
export type EngineFunctions = typeof functions;

const parent = createBirpc<ParentFunctions, EngineFunctions>(functions, {
  post: (message) => process.send?.(message),
  on: (receive) => process.on("message", receive),
  serialize: ({ e: error, ...message }) => ({
    ...message,
    // JSON would have no message of an error.
    e: error && { code: KvError.is(error) ? error.code : undefined, message: String(error) },
  }),
});

process.once("disconnect", () => {
  if (!closed) process.exit(1);
});
