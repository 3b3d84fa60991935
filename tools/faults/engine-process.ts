// An engine of a fault run in a process of its own, over NIXL: steered by messages, ended by SIGKILL or by being told to close.
import { zmqSideChannel } from "@kv/connector";
import { KvError, type KvTransferParams } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import type { SimRequest } from "@kv/testing/simulator/sim-options";
import { memoryNetwork, seededRandom } from "@kv/transport-memory";
import type { EngineProcessOrder, EngineQuestion, EngineSaying } from "./engine-messages.js";
import { heldBy, REAL_TIMES } from "./real-time.js";
import { createStrain } from "./strain.js";
import { strainedSideChannel } from "./strained-side-channel.js";
import { strainedTransport } from "./strained-transport.js";

const { connector, seed, layerwise, ...order } = JSON.parse(process.argv[2] ?? "{}") as EngineProcessOrder;
const say = (saying: EngineSaying) => void process.send?.(saying);
const network = memoryNetwork();
const { clock } = network.host(order.hostName);
const strain = createStrain(seededRandom(seed));
const transport = strainedTransport(nixlTransport({ backends: ["UCX"] }), {
  clock,
  strain,
  lateMs: REAL_TIMES.longMs,
});
const engine = await createSimEngine({
  ...order,
  network,
  transport,
  sideChannel: strainedSideChannel(zmqSideChannel(), strain),
  connector: connector === "pull" ? pullConnector : pushConnector,
  reportsLayers: layerwise,
  violation: (what) => say({ says: "violation", what }),
});

let closed = false;
const answers: Readonly<Record<EngineQuestion["ask"], (about: never) => unknown>> = {
  prefill: (request: SimRequest) => engine.prefill(request),
  decode: (request: SimRequest & { params: KvTransferParams }) => engine.decode(request),
  abort: (requestId: string) => engine.abort(requestId),
  outstanding: () => ({ ...engine.outstanding(), transfers: heldBy(transport.agents).transfers }),
  counts: () => strain.counts(),
  calm: () => strain.end(),
  async close() {
    await engine.close();
    closed = true;
    return heldBy(transport.agents);
  },
};

// Whoever steers it is gone.
process.once("disconnect", () => {
  if (!closed) process.exit(1);
});
process.on("message", ({ number, ask, about }: EngineQuestion) => {
  void (async () => {
    try {
      const value = await answers[ask](about as never);
      say({ says: "answer", number, value });
    } catch (error) {
      const code = KvError.is(error) ? { code: error.code } : {};
      say({ says: "error", number, ...code, message: String(error) });
    }
    if (ask === "close") process.disconnect();
  })();
});
say({ says: "ready", address: engine.address });
