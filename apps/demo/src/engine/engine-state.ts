import type { Clock, FinishReason, KvError, Log, SchedulerConnector, WorkerConnector } from "@kv/interface";
import type { BlockPool } from "./cache/block-pool.js";
import type { KvPool } from "./cache/kv-pool.js";
import type { EngineModel } from "./engine-model.js";
import type { EngineHooks } from "./hooks.js";
import type { RequestRecord, RequestState } from "./request.js";
import type { Wakeup } from "./wakeup.js";

/** What the parts of one engine share. */
export interface EngineState {
  readonly model: EngineModel;
  readonly pool: KvPool;
  readonly blocks: BlockPool;
  readonly blockSize: number;
  readonly scheduler: SchedulerConnector | undefined;
  readonly workers: readonly WorkerConnector[];
  readonly hooks: EngineHooks;
  readonly clock: Clock;
  readonly log: Log;
  readonly wakeup: Wakeup;
  /** Requests without an outcome, in order of arrival. */
  readonly alive: Map<string, RequestRecord>;
  /** Blocks of ended requests that a peer may read or write yet. */
  readonly held: Map<string, readonly number[]>;
}

export function inState({ alive }: EngineState, state: RequestState): RequestRecord[] {
  return [...alive.values()].filter((record) => record.state === state);
}

/** Marks a request to end at the next chance; the first reason stands. */
export function end(record: RequestRecord, reason: FinishReason, error?: KvError): void {
  record.ending ??= error === undefined ? { reason } : { reason, error };
}
