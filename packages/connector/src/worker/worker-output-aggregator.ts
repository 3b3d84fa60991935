import type { FailedReceive, WorkerOutput } from "@kv/interface";
import { type RankKey, rankKey } from "../requests/remote-request.js";

/** A worker of an engine. */
export interface WorkerRank {
  /** Tensor-parallel rank. */
  readonly tpRank: number;
  /** Pipeline-parallel rank. Default 0. */
  readonly ppRank?: number | undefined;
}

/**
 * Merges the outputs of an engine's workers: a request is sent or received when every worker has
 * reported it, and failed when one has failed (vLLM: `KVOutputAggregator`). An engine adds each
 * worker's output, frees what the merged output names, and passes that same output to the scheduler
 * connector in the same turn.
 */
export interface WorkerOutputAggregator {
  /**
   * Adds one worker's output, at any time. Returns the reports that are now complete. Throws
   * nothing.
   */
  add(worker: WorkerRank, output: WorkerOutput): WorkerOutput;
  /** Requests that some workers have reported and others have not. */
  readonly size: number;
}

/**
 * Creates an aggregator for an engine with `workers` workers: TP size times pipeline stages. Throws
 * nothing.
 */
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
  /** Requests that some worker received and no P compared with their prompt. */
  readonly #unverified = new Set<string>();
  /**
   * Workers that will report a request once more, because a peer may write to its blocks until
   * then.
   */
  readonly #atRisk = new Map<string, Set<RankKey>>();

  constructor(workers: number) {
    this.#workers = workers;
  }

  add(worker: WorkerRank, output: WorkerOutput): WorkerOutput {
    const rank = rankKey(worker);
    this.#noteFailures(rank, output);
    const named = new Set(output.failedReceiving.flatMap(({ blockIds }) => blockIds ?? []));
    // Blocks that belong to no failed request are passed on at once.
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
    const unverifiedReceiving = finishedReceiving.filter((id) => this.#unverified.delete(id));
    const failedReceiving: FailedReceive[] = [];
    for (const id of finishedReceiving) {
      const failure = this.#failures.get(id);
      if (failure === undefined) continue;
      this.#failures.delete(id);
      const { blocksAtRisk: _, ...certain } = failure;
      // Meanwhile, all of those workers may have reported that the blocks are safe.
      if (this.#atRisk.get(id)?.size === 0) this.#atRisk.delete(id);
      failedReceiving.push(this.#atRisk.has(id) ? { ...certain, blocksAtRisk: true } : certain);
      // Not earlier: a peer may still write to these block ids on another rank. Not later: another
      // request may own the blocks then.
      for (const blockId of failure.blockIds ?? []) failedBlockIds.add(blockId);
    }
    return {
      finishedSending: this.#complete(this.#sending, rank, output.finishedSending),
      finishedReceiving: [...finishedReceiving, ...safe],
      ...(unverifiedReceiving.length === 0 ? {} : { unverifiedReceiving }),
      failedReceiving,
      failedBlockIds: [...failedBlockIds],
      ...(output.connectorData === undefined ? {} : { connectorData: output.connectorData }),
    };
  }

  get size(): number {
    return new Set([...this.#sending.keys(), ...this.#receiving.keys(), ...this.#atRisk.keys()])
      .size;
  }

  #noteFailures(rank: RankKey, output: WorkerOutput): void {
    for (const failure of output.failedReceiving) {
      const { requestId } = failure;
      // The first failure gives the reason; all failures together give the blocks.
      const before = this.#failures.get(requestId);
      const blockIds = new Set([...(before?.blockIds ?? []), ...(failure.blockIds ?? [])]);
      this.#failures.set(requestId, { ...(before ?? failure), blockIds: [...blockIds] });
      if (failure.blocksAtRisk === true)
        this.#atRisk.set(requestId, (this.#atRisk.get(requestId) ?? new Set()).add(rank));
    }
  }

  /**
   * Records that a worker's blocks are safe. Returns true when every worker has reported the
   * request and the blocks of all workers are safe.
   */
  #becameSafe(id: string, rank: RankKey): boolean {
    const ranks = this.#atRisk.get(id);
    ranks?.delete(rank);
    if (ranks === undefined || ranks.size > 0 || this.#receiving.has(id)) return false;
    this.#atRisk.delete(id);
    return true;
  }

  /**
   * Records a worker's report of requests. Returns the requests that every worker has now reported.
   */
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
