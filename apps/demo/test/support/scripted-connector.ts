import type {
  FinishReason,
  LoadFailurePolicy,
  SchedulerConnector,
  StepMetadata,
  WorkerConnector,
  WorkerOutput,
} from "@kv/interface";
import { KvError } from "@kv/interface";

/**
 * A connector that transfers nothing. The test sets the tokens of a peer
 * (`kv_transfer_params.remote_tokens`), makes ranks report, and reads the recorded calls.
 */
export interface ScriptedConnector {
  readonly scheduler: SchedulerConnector;
  readonly workers: readonly WorkerConnector[];
  /** The calls with their request, in order. */
  readonly calls: string[];
  readonly allocated: Map<string, { blockIds: readonly number[]; externalTokens: number }>;
  readonly finished: Map<string, { reason: FinishReason; blockIds: readonly number[] }>;
  /** Makes one rank report; absent lists are empty. */
  report(rank: number, output: Partial<WorkerOutput>): void;
  received(requestId: string): void;
  sent(requestId: string): void;
}

export function scriptedConnector({
  ranks = 1,
  loadFailurePolicy = "fail",
}: {
  ranks?: number;
  loadFailurePolicy?: LoadFailurePolicy;
} = {}): ScriptedConnector {
  const calls: string[] = [];
  const allocated: ScriptedConnector["allocated"] = new Map();
  const finished: ScriptedConnector["finished"] = new Map();
  const news: WorkerOutput[][] = Array.from({ length: ranks }, () => []);
  const listeners: (() => void)[] = [];
  let step = 0;

  const scheduler: SchedulerConnector = {
    name: "Scripted",
    loadFailurePolicy,
    setHandshakeMetadata: async () => {},
    matchedTokens({ requestId, kvTransferParams }, numComputedTokens) {
      calls.push(`matchedTokens ${requestId} ${numComputedTokens}`);
      if (kvTransferParams?.refused === true)
        throw new KvError("KV_REQUEST_INVALID", `${requestId}: refused by the script`);
      const remote = Number(kvTransferParams?.remote_tokens ?? 0) - numComputedTokens;
      return remote > 0 ? { tokens: remote, async: true } : { tokens: 0, async: false };
    },
    afterAllocation({ requestId }, [blockIds = []], externalTokens) {
      calls.push(`afterAllocation ${requestId}`);
      allocated.set(requestId, { blockIds, externalTokens });
    },
    buildStepMetadata() {
      calls.push("buildStepMetadata");
      return { connector: "Scripted", step: step++ };
    },
    requestFinished({ requestId, kvTransferParams }, [blockIds = []], reason) {
      calls.push(`requestFinished ${requestId} ${reason}`);
      finished.set(requestId, { reason, blockIds });
      // Its KV may still be transferred: by the contract it ends with the workers' report.
      if (reason === "aborted") return { keepBlocks: Number(kvTransferParams?.remote_tokens) > 0 };
      if (kvTransferParams?.keep !== true || reason === "error") return { keepBlocks: false };
      return { keepBlocks: true, kvTransferParams: { remote_request_id: requestId } };
    },
    applyWorkerOutput() {
      calls.push("applyWorkerOutput");
    },
    hasPendingWork: () => false,
    outstanding: () => ({}),
    close: async () => {},
  };

  const workers = news.map(
    (queue, rank): WorkerConnector => ({
      name: "Scripted",
      registerKvCaches: async () => {},
      handshakeMetadata: async () => ({ tpRank: rank, ppRank: 0, payload: new Uint8Array() }),
      startLoad(metadata: StepMetadata) {
        calls.push(
          `startLoad ${rank} ${metadata.step === step - 1 ? "" : "of another step"}`.trim(),
        );
      },
      async waitForSave() {
        calls.push(`waitForSave ${rank}`);
      },
      collectFinished() {
        calls.push(`collectFinished ${rank}`);
        const outputs = queue.splice(0);
        return {
          finishedSending: outputs.flatMap((output) => output.finishedSending),
          finishedReceiving: outputs.flatMap((output) => output.finishedReceiving),
          unverifiedReceiving: outputs.flatMap((output) => output.unverifiedReceiving ?? []),
          failedReceiving: outputs.flatMap((output) => output.failedReceiving),
          failedBlockIds: outputs.flatMap((output) => output.failedBlockIds),
        };
      },
      onProgress: (listener) => listeners.push(listener),
      outstanding: () => ({}),
      close: async () => {},
    }),
  );

  const report = (rank: number, output: Partial<WorkerOutput>) => {
    news[rank]?.push({ ...NOTHING, ...output });
    listeners[rank]?.();
  };
  const reportAll = (output: Partial<WorkerOutput>) => {
    for (const rank of workers.keys()) report(rank, output);
  };
  return {
    scheduler,
    workers,
    calls,
    allocated,
    finished,
    report,
    received: (requestId) => reportAll({ finishedReceiving: [requestId] }),
    sent: (requestId) => reportAll({ finishedSending: [requestId] }),
  };
}

const NOTHING: WorkerOutput = {
  finishedSending: [],
  finishedReceiving: [],
  failedReceiving: [],
  failedBlockIds: [],
};
