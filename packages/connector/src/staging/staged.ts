import {
  ambient,
  type ConnectorModule,
  type EngineIdentity,
  KvError,
  type KvTransferConfig,
  type Platform,
} from "@kv/interface";
import { stagedScheduler } from "./staged-scheduler.js";
import { stagedWorker } from "./staged-worker.js";
import type { StagingCopied } from "./staging-step.js";

/** Options of `staged`. */
export interface StagedOptions {
  /** The platform; it must implement `createStaging`. */
  readonly platform: Platform;
  /**
   * Blocks of each rank's pool, including block 0, which is never allocated. `stagingPoolBlocks`
   * computes the number from bytes.
   */
  readonly poolBlocks: number;
  /** Called after the copies of a request between pool and device. */
  readonly onCopied?: (copied: StagingCopied) => void;
}

/**
 * Wraps a connector with host staging: a bounded pool of host buffers is registered and announced
 * to peers, and blocks are copied between the pool and the device. The inner connector sees only
 * host memory. See docs/design/staging.md.
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
      return stagedScheduler(await module.createScheduler(given), {
        cache: given.cache,
        poolBlocks,
      });
    },
    async createWorker(given) {
      refuseLayerwise(given.config);
      const { clock, log, tracer } = ambient(given);
      const direct = platform.capabilities.directRegistration?.find(({ backend }) =>
        given.config.backends.some(({ name }) => name === backend),
      );
      if (direct !== undefined) {
        // Log it: the transport could read device memory without these copies.
        log.info("staging-where-direct-registration-is-known", {
          device: platform.deviceType,
          ...direct,
        });
      }
      // The inner connector registers host memory.
      const inside = await module.createWorker({
        ...given,
        platform: { ...rest, capabilities: { ...rest.capabilities, registersAs: ["DRAM"] } },
      });
      const around = { platform, transport: given.transport, poolBlocks, clock, log, tracer };
      return stagedWorker(inside, { ...around, ...(onCopied === undefined ? {} : { onCopied }) });
    },
  };
}

/**
 * A decode worker's pool blocks hold the prompt and not the output, and a prefill worker copies
 * blocks out of the device only.
 */
function refuseReadback({ extra }: KvTransferConfig): void {
  if (extra.bidirectional_kv_xfer !== true) return;
  throw new KvError(
    "KV_PLATFORM_UNSUPPORTED",
    "kv_connector_extra_config.bidirectional_kv_xfer is true, and the KV cache is staged: the staging pool has no copy of the tokens that a decode worker generates",
    { hint: "leave it out, or use a platform that registers its memory directly" },
  );
}

/** The pool's blocks are those of one rank's tokens. */
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

/**
 * Blocks are copied into the pool with all their layers, after the forward pass: no layer can be
 * transferred while later ones are computed.
 */
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
