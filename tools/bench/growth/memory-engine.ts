import { registerCaches } from "@kv/conformance/engine/sides";
import type {
  ConnectorModule,
  ConnectorRequest,
  KvTransferParams,
  SchedulerConnector,
  WorkerConnector,
} from "@kv/interface";
import { createSimSides } from "@kv/testing/simulator/sim-sides";
import type { MemoryNetwork } from "@kv/transport-memory";

export type MemoryEngine = Awaited<ReturnType<typeof memoryEngine>>;

/** Both sides of a connector with one rank, on a host of a memory network. */
export async function memoryEngine(
  network: MemoryNetwork,
  name: string,
  connector: ConnectorModule,
) {
  const shape = { tpSize: 1, blockSize: 16, numBlocks: 64 };
  const options = { network, hostName: name, engineId: name, ...shape, connector };
  const sides = await createSimSides(options, network.host(name));
  await registerCaches(sides);
  const { scheduler, workers, close } = sides;
  return { scheduler, worker: workers[0] as WorkerConnector, close };
}

const PROMPT_TOKENS = 40;
const promptTokenIds = new Array<number>(PROMPT_TOKENS).fill(1);
export const BLOCK_IDS = [[1, 2, 3]];

export function request(requestId: string, kvTransferParams: KvTransferParams): ConnectorRequest {
  return { requestId, numPromptTokens: PROMPT_TOKENS, promptTokenIds, kvTransferParams };
}

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
