import { cpuPlatform, readTransferConfig } from "@kv/connector";
import type {
  ConnectorModule,
  ConnectorRequest,
  KvTransferParams,
  SchedulerConnector,
  WorkerConnector,
} from "@kv/interface";
import { engineIdentity } from "@kv/testing/engine-identity";
import { simConfig } from "@kv/testing/simulator/sim-config";
import { createSimRanks } from "@kv/testing/simulator/sim-ranks";
import { type MemoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";

/** Both sides of a connector with one rank, on a host of a memory network. */
export interface MemoryEngine {
  readonly scheduler: SchedulerConnector;
  readonly worker: WorkerConnector;
  close(): Promise<void>;
}

const NUM_BLOCKS = 64;

export async function memoryEngine(
  network: MemoryNetwork,
  name: string,
  connector: ConnectorModule,
): Promise<MemoryEngine> {
  const host = network.host(name);
  const transport = memoryTransport({ network, host });
  const sideChannel = memorySideChannel({ network, host });
  const cache = simConfig(16);
  const ranks = createSimRanks({ transport, config: cache, tpSize: 1, numBlocks: NUM_BLOCKS });
  const options = {
    clock: host.clock,
    random: host.random,
    config: {
      ...readTransferConfig({ kv_connector: "NixlConnector", kv_role: "kv_both" }),
      sideChannelHost: name,
    },
    engine: engineIdentity(name),
    cache,
    transport,
    platform: cpuPlatform(),
    sideChannel,
  };
  const scheduler = await connector.createScheduler(options);
  const worker = await connector.createWorker({ ...options, tpRank: 0, ppRank: 0 });
  for (const caches of ranks.caches) await worker.registerKvCaches(caches);
  await scheduler.setHandshakeMetadata([await worker.handshakeMetadata()]);
  return {
    scheduler,
    worker,
    async close() {
      await worker.close();
      await scheduler.close();
      await transport.close();
      ranks.close();
      await sideChannel.close();
    },
  };
}

const PROMPT_TOKENS = 40;
const promptTokenIds = new Array<number>(PROMPT_TOKENS).fill(1);
export const BLOCK_IDS = [[1, 2, 3]];

export function request(requestId: string, kvTransferParams: KvTransferParams): ConnectorRequest {
  return { requestId, numPromptTokens: PROMPT_TOKENS, promptTokenIds, kvTransferParams };
}

/** P has computed a prompt. Returns the request at D. */
export function prefilled(
  scheduler: SchedulerConnector,
  requestId: string,
  changed: KvTransferParams = {},
): ConnectorRequest {
  const given = request(requestId, { do_remote_decode: true });
  scheduler.afterAllocation(given, BLOCK_IDS, 0);
  const { kvTransferParams } = scheduler.requestFinished(given, BLOCK_IDS, "length");
  return request(requestId, { ...kvTransferParams, ...changed });
}
