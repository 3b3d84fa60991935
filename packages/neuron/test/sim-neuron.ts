import { staged } from "@kv/connector";
import { KvError, type Staging } from "@kv/interface";
import type { SimDevice, SimDeviceAround } from "@kv/testing/simulator/sim-options";
import { neuronPlatform } from "../src/index.js";
import { neuronRanks } from "./neuron-ranks.js";
import { visibleDevice } from "./visible-device.js";

export interface SimNeuronOptions {
  readonly poolBlocks: number;
  /** In [0, 1): chance of a copy to fail, and how long one takes. */
  readonly next?: () => number;
  readonly failures?: number;
  /** Breaks a rule on purpose; the run must detect it. */
  readonly wrapStaging?: (staging: Staging) => Staging;
}

/**
 * Adds a Neuron device to a simulated engine: staging around its connector, and memory that only
 * copies reach.
 */
export function simNeuron(around: SimDeviceAround, options: SimNeuronOptions): SimDevice {
  const { poolBlocks, next = () => 1, failures = 0, wrapStaging = (staging) => staging } = options;
  const { connector, transport, clock, config, tpSize, numBlocks } = around;
  const device = visibleDevice({
    transport,
    clock,
    copyMs: () => next() * 2,
    beforeCopy: (direction) => {
      if (next() < failures)
        throw new KvError("KV_STAGING_FAILED", `a ${direction} was made to fail`);
    },
  });
  const platform = neuronPlatform();
  return {
    connector: staged(connector, {
      poolBlocks,
      platform: {
        ...platform,
        async createStaging(given) {
          const staging = await platform.createStaging?.(given);
          if (staging === undefined) throw new Error("the platform stages");
          return wrapStaging(staging);
        },
      },
    }),
    ranks: neuronRanks({ device, config, tpSize, numBlocks }),
  };
}
