import type { KvTransferParams } from "@kv/interface";
import type { MemoryHost } from "@kv/transport-memory";
import type { SimEngineOptions, SimRequest } from "./sim-options.js";
import { createSimSides } from "./sim-sides.js";
import { createSimSteps } from "./sim-steps.js";

/**
 * An engine without a model: the connectors and the blocks are real, the KV is generated. It runs on one host of a memory network and
 * uses that host's clock.
 */
export interface SimEngine {
  readonly engineId: string;
  readonly host: MemoryHost;
  readonly tpSize: number;
  readonly alive: boolean;
  /** Address on which its side channel listens. */
  readonly address: { readonly host: string; readonly port: number };
  /** Computes a prompt, and resolves to the parameters for the engine that reads its KV. `params` of a D: reads the last turn back before. */
  prefill(request: SimRequest & { readonly cachedTokens?: number }): Promise<KvTransferParams>;
  /**
   * Receives a prompt's KV, generates its output, and resolves when the request ends, to the parameters for the P of the next turn. A wrong byte is a
   * violation.
   */
  decode(
    request: SimRequest & { params: KvTransferParams; cachedTokens?: number },
  ): Promise<KvTransferParams>;
  abort(requestId: string): void;
  /** As `SimSteps.sleep`. */
  sleep(): Promise<void>;
  /** As `SimSteps.wakeUp`. */
  wakeUp(): Promise<void>;
  /** Counts of everything that the engine holds, by name, blocks included. All counts are zero when all requests are over. */
  outstanding(): Readonly<Record<string, number>>;
  /**
   * Ends the engine as SIGKILL does. Resolves when its resources are released: at once, unless the options gave it a transport or a side
   * channel.
   */
  kill(): Promise<void>;
  close(): Promise<void>;
}

/** Parameters that a proxy knows before the producer has answered. A proxy that sends both legs at once uses them. */
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
    sleep: steps.sleep,
    wakeUp: steps.wakeUp,
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
