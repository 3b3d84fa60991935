// A connector of one's own, registered out of tree: pull, with a count of what arrives. An engine
// finds it by the name in its configuration.
import {
  memoryMetrics,
  readTransferConfig,
  registerConnector,
  resolveConnector,
} from "@kv/connector";
import { delegateTo } from "@kv/connector/building-blocks";
import { ambient } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { startEngine } from "./engine.mjs";

const name = "MyConnector";
/** @type {import("@kv/interface").ConnectorModule} */
const mine = {
  name,
  createScheduler: async (options) =>
    delegateTo(await pullConnector.createScheduler(options), { name }),
  async createWorker(options) {
    const worker = await pullConnector.createWorker(options);
    return delegateTo(worker, {
      name,
      collectFinished() {
        const output = worker.collectFinished();
        ambient(options).metrics.count("my_prompts_received", output.finishedReceiving.length);
        return output;
      },
    });
  },
};
registerConnector(name, async () => mine); // in a package of yours: () => import("my-kv-connector")

const network = memoryNetwork();
const metrics = memoryMetrics();
const start = async (host, kv_role) => {
  const config = { ...readTransferConfig({ kv_connector: name, kv_role }), sideChannelHost: host };
  const connector = await resolveConnector(config);
  const transport = memoryTransport({ network, host });
  const sideChannel = memorySideChannel({ network, host });
  return startEngine({ engineId: host, connector, config, transport, sideChannel, metrics });
};
const [p, d] = [await start("p", "kv_producer"), await start("d", "kv_consumer")];
const tokens = Array.from({ length: 48 }, (_, position) => position);
const prompt = { requestId: "r", numPromptTokens: 48, promptTokenIds: tokens };
const kvTransferParams = p.prefill(prompt, [5, 9, 2]);
const sent = p.sent("r");
await d.receive({ ...prompt, kvTransferParams }, [30, 1, 17]);
await sent;
console.log("prompts received:", metrics.total("my_prompts_received"));
await Promise.all([d.close(), p.close()]);
