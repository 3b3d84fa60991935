import type { FailedReceive, WorkerOutput } from "@kv/interface";
import { type RankKey, rankKey } from "../requests/references.js";
import { withUnverified } from "./connector-worker.js";

export interface WorkerRank {
  readonly tpRank: number;
  readonly ppRank?: number | undefined;
}

/**
 * Merges the workers' outputs (vLLM: `KVOutputAggregator`): sent or received when every worker has
 * reported it, failed when one has. In one turn, the engine frees what the merged output names and
 * passes it to the scheduler connector.
 */
export interface WorkerOutputAggregator {
  /** Returns the reports that are now complete. Throws nothing. */
  add(worker: WorkerRank, output: WorkerOutput): WorkerOutput;
  readonly size: number;
}

/** Creates an aggregator for `workers` workers: TP size times pipeline stages. Throws nothing. */
export function createWorkerOutputAggregator({
  workers,
}: {
  readonly workers: number;
}): WorkerOutputAggregator {
  return new OutputAggregator(workers);
}

class OutputAggregator implements WorkerOutputAggregator {
  readonly #workers: number;
  readonly #sending = new Map<string, Set<RankKey>>();
  readonly #receiving = new Map<string, Set<RankKey>>();
  readonly #failures = new Map<string, FailedReceive>();
  readonly #unverified = new Set<string>();
  /** Workers that will report once more: until then a peer may write to the blocks. */
  readonly #atRisk = new Map<string, Set<RankKey>>();

  constructor(workers: number) {
    this.#workers = workers;
  }

  add(worker: WorkerRank, output: WorkerOutput): WorkerOutput {
    const rank = rankKey(worker);
    this.#noteFailures(rank, output);
    const named = new Set(output.failedReceiving.flatMap(({ blockIds }) => blockIds ?? []));
    // Blocks of no failed request are passed on at once.
    const failedBlockIds = new Set(output.failedBlockIds.filter((id) => !named.has(id)));
    const reported: string[] = [];
    const safe: string[] = [];
    for (const id of output.finishedReceiving) {
      const isFailure = output.failedReceiving.some(({ requestId }) => requestId === id);
      if (isFailure || this.#atRisk.get(id)?.has(rank) !== true) reported.push(id);
      else if (this.#becameSafe(id, rank)) safe.push(id);
    }
    for (const id of output.unverifiedReceiving ?? []) this.#unverified.add(id);
    const finishedReceiving = this.#complete(this.#receiving, rank, reported);
    const failedReceiving: FailedReceive[] = [];
    for (const id of finishedReceiving) {
      const failure = this.#failures.get(id);
      if (failure === undefined) continue;
      this.#failures.delete(id);
      const { blocksAtRisk: _, ...certain } = failure;
      // By now, all of those workers may have reported the blocks safe.
      if (this.#atRisk.get(id)?.size === 0) this.#atRisk.delete(id);
      failedReceiving.push(this.#atRisk.has(id) ? { ...certain, blocksAtRisk: true } : certain);
      // Not earlier: a peer may still write on another rank. Not later: another request may own the
      // blocks.
      for (const blockId of failure.blockIds ?? []) failedBlockIds.add(blockId);
    }
    const { connectorData } = output;
    const merged = {
      finishedSending: this.#complete(this.#sending, rank, output.finishedSending),
      finishedReceiving: [...finishedReceiving, ...safe],
      failedReceiving,
      failedBlockIds: [...failedBlockIds],
      ...(connectorData === undefined ? {} : { connectorData }),
    };
    return withUnverified(merged, this.#unverified);
  }

  get size(): number {
    return new Set([
      ...this.#sending.keys(),
      ...this.#receiving.keys(),
      ...this.#atRisk.keys(),
      ...this.#failures.keys(),
      ...this.#unverified,
    ]).size;
  }

  #noteFailures(rank: RankKey, output: WorkerOutput): void {
    for (const failure of output.failedReceiving) {
      const { requestId } = failure;
      // The first failure gives the reason, all of them the blocks.
      const before = this.#failures.get(requestId);
      const blockIds = new Set([...(before?.blockIds ?? []), ...(failure.blockIds ?? [])]);
      this.#failures.set(requestId, { ...(before ?? failure), blockIds: [...blockIds] });
      if (failure.blocksAtRisk === true)
        this.#atRisk.set(requestId, (this.#atRisk.get(requestId) ?? new Set()).add(rank));
    }
  }

  #becameSafe(id: string, rank: RankKey): boolean {
    const ranks = this.#atRisk.get(id);
    ranks?.delete(rank);
    if (ranks === undefined || ranks.size > 0 || this.#receiving.has(id)) return false;
    this.#atRisk.delete(id);
    return true;
  }

  #complete(pending: Map<string, Set<RankKey>>, rank: RankKey, ids: readonly string[]): string[] {
    return ids.filter((id) => {
      const ranks = pending.get(id) ?? new Set();
      ranks.add(rank);
      if (ranks.size < this.#workers) {
        pending.set(id, ranks);
        return false;
      }
      pending.delete(id);
      return true;
    });
  }
}
