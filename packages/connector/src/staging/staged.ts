import {
  ambient,
  type ConnectorModule,
  type EngineIdentity,
  KvError,
  type KvTransferConfig,
  type Platform,
} from "@kv/interface";
import { stagedScheduler } from "./staged-scheduler.js";
import { StagedWorker, type StagingCopied } from "./staged-worker.js";

/** Options of `staged`. */
export interface StagedOptions {
  /** Must implement `createStaging`. */
  readonly platform: Platform;
  /** Per rank, with block 0, which is never allocated. `stagingPoolBlocks` converts from bytes. */
  readonly poolBlocks: number;
  readonly onCopied?: (copied: StagingCopied) => void;
}

/**
 * Adds host staging to a connector: peers see a bounded pool of host buffers, and blocks are copied
 * between it and the device. See docs/design/staging.md.
 * @throws `KV_PLATFORM_UNSUPPORTED`.
 */
export function staged(module: ConnectorModule, options: StagedOptions): ConnectorModule {
  const { platform, poolBlocks, onCopied } = options;
  const { createStaging, ...rest } = platform;
  if (createStaging === undefined) {
    throw new KvError("KV_PLATFORM_UNSUPPORTED", `platform ${platform.deviceType} has no staging`, {
      hint: "pass the platform to the connector without staged()",
    });
  }
  return {
    name: module.name,
    async createScheduler(given) {
      refuseLayerwise(given.config);
      refuseReadback(given.config);
      refuseContextParallel(given.engine);
      return stagedScheduler(await module.createScheduler(given), given.cache, poolBlocks);
    },
    async createWorker(given) {
      refuseLayerwise(given.config);
      const { clock, log, tracer } = ambient(given);
      const direct = platform.capabilities.directRegistration?.find(({ backend }) =>
        given.config.backends.some(({ name }) => name === backend),
      );
      if (direct !== undefined) {
        // The transport could read device memory without these copies.
        log.info("staging-where-direct-registration-is-known", {
          device: platform.deviceType,
          ...direct,
        });
      }
      // It registers host memory.
      const inside = await module.createWorker({
        ...given,
        platform: { ...rest, capabilities: { ...rest.capabilities, registersAs: ["DRAM"] } },
      });
      const { transport } = given;
      const around = { platform, transport, poolBlocks, clock, log, tracer, onCopied };
      return new StagedWorker(inside, around);
    },
  };
}

/** D's pool blocks lack the output, and P never copies into the device. */
function refuseReadback({ extra }: KvTransferConfig): void {
  if (extra.bidirectional_kv_xfer !== true) return;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    "kv_connector_extra_config.bidirectional_kv_xfer is true, and the KV cache is staged: the staging pool has no copy of the tokens that a decode worker generates",
    { hint: "leave it out, or use a platform that registers its memory directly" },
  );
}

/** A pool block holds one rank's tokens. */
function refuseContextParallel({ dcpSize = 1 }: EngineIdentity): void {
  if (dcpSize === 1) return;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    `this engine has decode context parallelism of ${dcpSize}, and the KV cache is staged: each rank's pool holds whole sequences`,
    {
      hint: "leave it out, or use a platform that registers its memory directly",
      details: { dcpSize },
    },
  );
}

/** All layers are copied after the forward pass, so none can be sent earlier. */
function refuseLayerwise({ extra, role }: KvTransferConfig): void {
  if (extra.push_layerwise !== true || role === "kv_consumer") return;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    "kv_connector_extra_config.push_layerwise is true, and the KV cache is staged: its blocks are copied to host memory after the forward pass, all layers at once",
    {
      hint: "leave push_layerwise out on the prefill side, or use a platform that registers its memory directly",
    },
  );
}
