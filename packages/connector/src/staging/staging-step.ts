import { type BlockIds, KvError, type StepMetadata } from "@kv/interface";

/**
 * Staging instructions from the scheduler side to the workers, under `staging` in the step's
 * metadata; absent when there are none.
 */
export interface StagingOrders {
  /**
   * Prefill: running requests, whose blocks are copied into the pool as their prompt is computed.
   */
  readonly saves: readonly StagedRequest[];
  /**
   * Prefill: requests that no longer run and have nothing more to copy; their pool blocks still
   * wait for readers.
   */
  readonly saved: readonly string[];
  /** Decode: requests whose KV will be transferred into the pool and then copied to the device. */
  readonly loads: readonly StagedRequest[];
  /** Requests whose pool blocks were freed. */
  readonly over: readonly string[];
}

export interface StagedRequest {
  readonly requestId: string;
  /** Block ids in pairs, per KV cache group. */
  readonly device: BlockIds;
  readonly wire: BlockIds;
  readonly numTokens: number;
  /** Parent of the copies' spans. */
  readonly traceparent?: string | undefined;
}

/**
 * Reads the staging instructions of a step.
 * @throws `KV_INTERNAL` when the key holds anything else.
 */
export function stagingOrders(step: StepMetadata): StagingOrders | undefined {
  const { staging } = step;
  if (staging === undefined) return undefined;
  const { saves, saved, loads, over } = (staging ?? {}) as Partial<StagingOrders>;
  if ([saves, saved, loads, over].every(Array.isArray)) return staging as StagingOrders;
  throw new KvError(
    "KV_INTERNAL",
    `step ${step.step}: its metadata has something else under "staging"`,
    {
      hint: "put staged() of the same version around both sides",
    },
  );
}

/** The copies of one request in one step. */
export interface StagingCopied {
  /** The engine's id of the request. */
  readonly requestId: string;
  /** `save`: device to pool, on P. `load`: pool to device, on D. */
  readonly direction: "save" | "load";
  /** Pool blocks, per KV cache group. */
  readonly wire: BlockIds;
  /** Duration from the start of the first copy to the end of the last. */
  readonly durationMs: number;
}
