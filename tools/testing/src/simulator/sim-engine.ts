import { registerCaches } from "@kv/conformance/engine/sides";
import { createSteps } from "@kv/conformance/engine/steps";
import { createWorkerOutputAggregator } from "@kv/connector";
import type { SimEngineOptions } from "./sim-options.js";
import { createSimSides } from "./sim-sides.js";

export { coordinatesOf } from "@kv/conformance/engine/play-scene";

export function outcomeOf(work: Promise<unknown>): Promise<string> {
  return work.then(
    () => "ok",
    (error: { code?: string }) => error.code ?? String(error),
  );
}

export type SimEngine = Awaited<ReturnType<typeof createSimEngine>>;

/** Without a model: connectors and blocks are real, the KV is generated. */
export async function createSimEngine(options: SimEngineOptions) {
  const { network, hostName, engineId, tpSize, skewMs } = options;
  const host = network.host(hostName, skewMs === undefined ? {} : { skewMs });
  const sides = await createSimSides(options, host);
  await registerCaches(sides);
  const steps = createSteps(options, sides, host.clock, createWorkerOutputAggregator);
  host.onKill(steps.die);
  return {
    ...steps,
    engineId,
    host,
    tpSize,
    address: sides.address(),
    get alive() {
      return steps.alive;
    },
    /** Resolves when its resources are released. */
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
