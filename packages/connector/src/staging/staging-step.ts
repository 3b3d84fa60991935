import { type BlockIds, KvError, type StepMetadata } from "@kv/interface";

/** What the scheduler side tells the workers of staging, under `staging` in the step's metadata; absent where there is nothing to tell. */
export interface StagingOrders {
  /** Prefill: requests that run, to be saved when their prompt is computed. */
  readonly saves: readonly StagedRequest[];
  /** Prefill: requests that do not run any more, while their pool blocks wait for readers: there is nothing more to save. */
  readonly saved: readonly string[];
  /** Decode: requests whose KV will land in the pool, to be loaded then. */
  readonly loads: readonly StagedRequest[];
  /** Requests whose pool blocks went back. */
  readonly over: readonly string[];
}

export interface StagedRequest {
  readonly requestId: string;
  /** Pairwise, per KV cache group. */
  readonly device: BlockIds;
  readonly wire: BlockIds;
  readonly numTokens: number;
}

/** Errors: `KV_INTERNAL` for something else under the key. */
export function stagingOrders(step: StepMetadata): StagingOrders | undefined {
  const { staging } = step;
  if (staging === undefined) return undefined;
  const { saves, saved, loads, over } = (staging ?? {}) as Partial<StagingOrders>;
  if ([saves, saved, loads, over].every(Array.isArray)) return staging as StagingOrders;
  throw new KvError("KV_INTERNAL", `step ${step.step}: its metadata has something else under "staging"`, {
    hint: "put staged() of the same version around both sides",
  });
}

/** The copies of one request in one step. */
export interface StagingCopied {
  /** The engine's id of the request. */
  readonly requestId: string;
  /** `save`: device to pool, on P. `load`: pool to device, on D. */
  readonly direction: "save" | "load";
  /** Pool blocks, per KV cache group. */
  readonly wire: BlockIds;
  /** From the first copy to the last. */
  readonly durationMs: number;
}
