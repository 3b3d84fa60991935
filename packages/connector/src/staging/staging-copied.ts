import type { BlockIds } from "@kv/interface";

/** A request's copies in one step. */
export interface StagingCopied {
  readonly requestId: string;
  readonly direction: "save" | "load";
  /** Pool blocks, per KV cache group. */
  readonly wire: BlockIds;
  readonly durationMs: number;
}
