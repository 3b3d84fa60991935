import type { FailedReceive, WorkerOutput } from "@kv/interface";

/**
 * Merges what the ranks of one engine report: a request counts as sent or received when every rank has said so (vLLM:
 * `KVOutputAggregator`), and as failed when one rank failed. An engine puts its workers' outputs through this, frees what the
 * merged output names, and hands that same output to the scheduler connector in the same turn.
 */
export interface WorkerOutputAggregator {
  /** One output of one worker, any time. Answers what is complete with it. */
  add(tpRank: number, output: WorkerOutput): WorkerOutput;
  /** Requests that some ranks have reported and others have not. */
  readonly size: number;
}

export function createWorkerOutputAggregator({ workers }: { workers: number }): WorkerOutputAggregator {
  const sending = new Map<string, Set<number>>();
  const receiving = new Map<string, Set<number>>();
  const failures = new Map<string, FailedReceive>();
  /** Ranks that will report a request once more: a peer may write to its blocks until then. */
  const atRisk = new Map<string, Set<number>>();

  function complete(pending: Map<string, Set<number>>, tpRank: number, ids: readonly string[]): string[] {
    return ids.filter((id) => {
      const ranks = pending.get(id) ?? new Set();
      ranks.add(tpRank);
      if (ranks.size < workers) {
        pending.set(id, ranks);
        return false;
      }
      pending.delete(id);
      return true;
    });
  }

  /** Whether this is a rank's first report of a request, or the one that its blocks are at risk no more. */
  function secure(
    id: string,
    tpRank: number,
    failed: readonly FailedReceive[],
  ): "first" | "others are at risk" | "all secured" {
    const ranks = atRisk.get(id);
    if (ranks?.has(tpRank) !== true || failed.some(({ requestId }) => requestId === id)) return "first";
    ranks.delete(tpRank);
    // While some rank has not reported at all the request is not over for the engine.
    if (ranks.size > 0 || receiving.has(id)) return "others are at risk";
    atRisk.delete(id);
    return "all secured";
  }

  return {
    add(tpRank, output) {
      for (const failure of output.failedReceiving) {
        // The first failure of a request tells why; all of them tell which blocks.
        const before = failures.get(failure.requestId);
        const blockIds = new Set([...(before?.blockIds ?? []), ...(failure.blockIds ?? [])]);
        failures.set(failure.requestId, { ...(before ?? failure), blockIds: [...blockIds] });
        if (failure.blocksAtRisk === true) {
          atRisk.set(failure.requestId, (atRisk.get(failure.requestId) ?? new Set()).add(tpRank));
        }
      }
      const named = new Set(output.failedReceiving.flatMap(({ blockIds }) => blockIds ?? []));
      // Of no request in particular: told as it comes.
      const failedBlockIds = new Set(output.failedBlockIds.filter((id) => !named.has(id)));
      const fresh: string[] = [];
      const secured: string[] = [];
      for (const id of output.finishedReceiving) {
        const again = secure(id, tpRank, output.failedReceiving);
        if (again === "first") fresh.push(id);
        else if (again === "all secured") secured.push(id);
      }
      const finishedReceiving = complete(receiving, tpRank, fresh);
      const failedReceiving: FailedReceive[] = [];
      for (const id of finishedReceiving) {
        const failure = failures.get(id);
        if (failure === undefined) continue;
        failures.delete(id);
        const { blocksAtRisk: _, ...certain } = failure;
        // All of those ranks may have said since that nobody can write any more.
        if (atRisk.get(id)?.size === 0) atRisk.delete(id);
        failedReceiving.push(atRisk.has(id) ? { ...certain, blocksAtRisk: true } : certain);
        // Not before: another rank may have been written to under these ids; and not later: they may have other owners then.
        for (const blockId of failure.blockIds ?? []) failedBlockIds.add(blockId);
      }
      return {
        finishedSending: complete(sending, tpRank, output.finishedSending),
        finishedReceiving: [...finishedReceiving, ...secured],
        failedReceiving,
        failedBlockIds: [...failedBlockIds],
        ...(output.connectorData === undefined ? {} : { connectorData: output.connectorData }),
      };
    },
    get size() {
      return new Set([...sending.keys(), ...receiving.keys(), ...atRisk.keys()]).size;
    },
  };
}
