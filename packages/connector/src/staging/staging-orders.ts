import { type BlockIds, KvError, type StepMetadata } from "@kv/interface";

/** What the scheduler side tells the workers of staging, under `staging` in the step's metadata; absent where there is nothing to tell. */
export interface StagingOrders {
  /** Prefill: requests that run, to be saved when their prompt is computed. */
  readonly saves: readonly StagedRequest[];
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
  const { saves, loads, over } = (staging ?? {}) as Partial<StagingOrders>;
  if (Array.isArray(saves) && Array.isArray(loads) && Array.isArray(over)) return staging as StagingOrders;
  throw new KvError("KV_INTERNAL", `step ${step.step}: its metadata has something else under "staging"`, {
    hint: "put staged() of the same version around both sides",
  });
}
