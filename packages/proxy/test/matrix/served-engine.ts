import { METRICS, memoryMetrics } from "@kv/connector";
import type { ConnectorModule, KvTransferParams } from "@kv/interface";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { createSimEngine } from "@kv/testing/simulator/sim-engine";
import type { MemoryNetwork } from "@kv/transport-memory";

export interface ServedEngineOptions {
  readonly network: MemoryNetwork;
  readonly hostName: string;
  readonly isPush: boolean;
  violation(what: string): void;
}

/** P frees by itself what nobody has freed until then, and forgets a D that has withdrawn. */
const LIMITS = { kv_lease_duration: 6, request_timeout: 6 };
/** Three blocks. */
const PROMPT = { prompt: 1, numTokens: 40 };

export type ServedEngine = Awaited<ReturnType<typeof startServedEngine>>;

/** An engine with real connectors and blocks, as an HTTP server uses it. */
export async function startServedEngine(options: ServedEngineOptions) {
  const { hostName, isPush } = options;
  const metrics = memoryMetrics();
  const connector: ConnectorModule = isPush ? pushConnector : pullConnector;
  const engine = await createSimEngine({
    ...options,
    engineId: `engine ${hostName}`,
    tpSize: 1,
    blockSize: 16,
    numBlocks: 64,
    connector,
    metrics,
    extra: LIMITS,
  });
  let serial = 0;
  /** In push, both legs have one id. */
  const idOf = (requestId: string) => {
    serial += 1;
    return isPush ? requestId : `${requestId}-${serial}`;
  };
  const begin = (leg: "prefill" | "decode", given: string, params: KvTransferParams) => {
    const requestId = idOf(given);
    return {
      answer: engine[leg]({ ...PROMPT, requestId, params }),
      abort: () => engine.abort(requestId),
    };
  };
  return {
    kv: { engineId: engine.engineId, ...engine.address },
    /** Requests, blocks, leases, transfers and messages that it holds, by name. */
    outstanding: () => engine.outstanding(),
    leasesEnded: () => metrics.total(METRICS.expiredRequests),
    prefill: (requestId: string, params: KvTransferParams) => begin("prefill", requestId, params),
    decode: (requestId: string, params: KvTransferParams) => begin("decode", requestId, params),
    close: () => engine.close(),
  };
}
