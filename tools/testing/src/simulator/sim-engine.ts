import type { KvTransferParams } from "@kv/interface";
import type { SimEngine, SimEngineOptions } from "./sim-options.js";
import { createSimSides, registerCaches } from "./sim-sides.js";
import { createSimSteps } from "./sim-steps.js";

export type { SimEngine } from "./sim-options.js";

/** "ok", or the code of the error. */
export function outcomeOf(work: Promise<unknown>): Promise<string> {
  return work.then(
    () => "ok",
    (error: { code?: string }) => error.code ?? String(error),
  );
}

/** What a proxy that sends both legs at once knows before the producer has answered. */
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
  await registerCaches(sides);
  const steps = createSimSteps(options, sides, host);
  return {
    ...steps,
    engineId,
    host,
    tpSize,
    address: sides.address(),
    get alive() {
      return steps.alive;
    },
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
