// An engine of a fault run in its own process, over NIXL. The parent sends it commands over IPC; SIGKILL or a `close` command ends it.

import { KvError, type KvTransferParams } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import type { SimRequest } from "@kv/testing/simulator/sim-options";
import { memoryNetwork, seededRandom } from "@kv/transport-memory";
import type { EngineCommand, EngineMessage, EngineProcessOptions } from "./engine-messages.js";
import { createFaultInjector } from "./fault-injector.js";
import { faultySideChannel } from "./faulty-side-channel.js";
import { faultyTransport } from "./faulty-transport.js";
import { heldBy } from "./held-resources.js";
import { REAL_CLOCK_TIMEOUTS } from "./timeouts.js";

const { connector, seed, layerwise, ...options } = JSON.parse(
  process.argv[2] ?? "{}",
) as EngineProcessOptions;
const send = (message: EngineMessage) => void process.send?.(message);
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
  violation: (what) => send({ kind: "violation", what }),
});

let closed = false;
const answers: Readonly<Record<EngineCommand["name"], (argument: never) => unknown>> = {
  prefill: (request: SimRequest) => engine.prefill(request),
  decode: (request: SimRequest & { params: KvTransferParams }) => engine.decode(request),
  abort: (requestId: string) => engine.abort(requestId),
  outstanding: () => ({ ...engine.outstanding(), transfers: heldBy(transport.agents).transfers }),
  counts: () => injector.counts(),
  stopFaults: () => injector.end(),
  async close() {
    await engine.close();
    closed = true;
    return heldBy(transport.agents);
  },
};

// Runs when the parent is gone.
process.once("disconnect", () => {
  if (!closed) process.exit(1);
});
process.on("message", ({ number, name, argument }: EngineCommand) => {
  void (async () => {
    try {
      const value = await answers[name](argument as never);
      send({ kind: "answer", number, value });
    } catch (error) {
      const code = KvError.is(error) ? { code: error.code } : {};
      send({ kind: "error", number, ...code, message: String(error) });
    }
    if (name === "close") process.disconnect();
  })();
});
send({ kind: "ready", address: engine.address });
