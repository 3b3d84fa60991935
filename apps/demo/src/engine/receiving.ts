import { KvError, type WorkerOutput } from "@kv/interface";
import { blocksFor } from "./admission.js";
import { type EngineState, end, inState } from "./engine-state.js";
import { cachePrompt } from "./model-runner.js";
import type { RequestRecord } from "./request.js";

/** Acts on what the workers say of KV that was sent and received. `output` is that of all ranks together. */
export async function applyOutput(output: WorkerOutput, engine: EngineState): Promise<void> {
  const { alive, scheduler, wakeup } = engine;
  scheduler?.applyWorkerOutput(output);
  const invalid = new Set(output.failedBlockIds);
  for (const record of inState(engine, "remote")) {
    record.blocksFailed ||= record.blockIds.some((id) => invalid.has(id));
  }
  const failures = new Map(output.failedReceiving.map((failed) => [failed.requestId, failed]));
  for (const requestId of output.finishedReceiving) {
    const record = alive.get(requestId);
    if (record?.state !== "remote") {
      free(requestId, engine);
      continue;
    }
    const failed = failures.get(requestId);
    if (failed === undefined && !record.blocksFailed) {
      await received(record, engine).catch((error: unknown) => {
        record.state = "running";
        end(
          record,
          "error",
          KvError.from(error, "KV_ENGINE_FAILED", `KV of request ${requestId} could not be taken over`),
        );
      });
    } else {
      const code = failed?.code ?? "KV_TRANSFER_FAILED";
      const message = failed?.message ?? `KV of request ${requestId} did not arrive in all of its blocks`;
      const details = { requestId, failureType: failed?.failureType };
      notReceived(record, new KvError(code, message, { details }), engine, failed?.blocksAtRisk === true);
    }
    wakeup.wake();
  }
  for (const requestId of output.finishedSending) {
    engine.hooks.afterSend?.({ requestId, blockIds: engine.held.get(requestId) ?? [] });
    free(requestId, engine);
  }
}

async function received(record: RequestRecord, { blocks, blockSize, hooks }: EngineState): Promise<void> {
  const { request, connectorRequest, blockIds, cachedBlocks } = record;
  const covered = cachedBlocks * blockSize + record.remoteTokens;
  if (hooks.afterReceive !== undefined && connectorRequest.kvTransferParams !== undefined) {
    const { damaged } = await hooks.afterReceive({
      requestId: request.requestId,
      kvTransferParams: connectorRequest.kvTransferParams,
      blockIds: blockIds.slice(0, blocksFor(covered, blockSize)),
      tokens: covered,
      cachedBlocks,
      forwardMs: record.forwardMs,
      askedAtMs: record.remoteSinceMs,
    });
    record.uncacheable = damaged;
  }
  cachePrompt(record, covered, { blocks, blockSize });
  // All of the prompt may be there, and yet its last token is computed again: its logits say how to go on.
  record.numComputedTokens = Math.min(covered, request.promptTokens.length - 1);
  record.state = "running";
}

/** The KV of a request did not arrive: by the connector's policy it fails, or computes the prompt itself. */
function notReceived(
  record: RequestRecord,
  error: KvError,
  { scheduler, log }: EngineState,
  blocksAtRisk: boolean,
): void {
  record.state = "running";
  record.remoteTokens = 0;
  // What may be written to yet cannot be computed into.
  if (blocksAtRisk || scheduler?.loadFailurePolicy !== "recompute") {
    end(record, "error", error);
    return;
  }
  const { requestId } = record.request;
  log.warn("kv-recomputed", { requestId, code: error.code, message: error.message });
}

function free(requestId: string, { held, blocks, log, wakeup }: EngineState): void {
  const blockIds = held.get(requestId);
  if (blockIds === undefined) {
    log.warn("unknown-request-finished", { requestId });
    return;
  }
  held.delete(requestId);
  blocks.release(blockIds);
  wakeup.wake();
}
