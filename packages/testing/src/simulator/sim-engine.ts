import type { KvTransferParams } from "@kv/interface";
import type { MemoryHost } from "@kv/transport-memory";
import type { SimEngineOptions, SimRequest } from "./sim-options.js";
import { createSimSides } from "./sim-sides.js";
import { createSimSteps } from "./sim-steps.js";

/** An engine without a model: real connectors, real blocks, made-up KV. It lives on one host of a memory network, in its time. */
export interface SimEngine {
  readonly engineId: string;
  readonly host: MemoryHost;
  readonly tpSize: number;
  readonly alive: boolean;
  /** Where its side channel listens. */
  readonly address: { readonly host: string; readonly port: number };
  /** Computes a prompt and answers the parameters for the one who reads it. */
  prefill(request: SimRequest): Promise<KvTransferParams>;
  /** Receives a prompt's KV, and resolves when every byte of it is right. */
  decode(request: SimRequest & { params: KvTransferParams; cachedTokens?: number }): Promise<void>;
  abort(requestId: string): void;
  /** What is held, by name, blocks included; nothing but zeros when all requests are over. */
  outstanding(): Readonly<Record<string, number>>;
  /** As SIGKILL. Resolves when nothing of it is left: at once, unless it was handed a transport or a side channel. */
  kill(): Promise<void>;
  close(): Promise<void>;
}

/** What a proxy knows of a producer before it has answered: where both legs go out at once. */
export function coordinatesOf(
  { engineId, address, tpSize }: Pick<SimEngine, "engineId" | "address" | "tpSize">,
  requestId: string,
): KvTransferParams {
  return {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_engine_id: engineId,
    remote_request_id: requestId,
    remote_host: address.host,
    remote_port: address.port,
    tp_size: tpSize,
  };
}

export async function createSimEngine(options: SimEngineOptions): Promise<SimEngine> {
  const { network, hostName, engineId, tpSize, skewMs } = options;
  const host = network.host(hostName, skewMs === undefined ? {} : { skewMs });
  const sides = await createSimSides(options, host);
  const steps = createSimSteps(options, sides, host);
  return {
    engineId,
    host,
    tpSize,
    address: sides.address(),
    get alive() {
      return steps.alive;
    },
    prefill: steps.prefill,
    decode: steps.decode,
    abort: steps.abort,
    outstanding: steps.outstanding,
    async kill() {
      host.kill();
      await sides.bury();
    },
    async close() {
      steps.stop();
      await sides.close();
    },
  };
}
