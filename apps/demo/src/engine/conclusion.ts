import { KvError } from "@kv/interface";
import { blocksFor } from "./admission.js";
import type { EngineState } from "./engine-state.js";
import { cacheOutput } from "./model-runner.js";
import type { RequestRecord } from "./request.js";

/** Gives every request that is to end its outcome, and takes back its blocks where nobody else may touch them. */
export async function concludeEnded(engine: EngineState): Promise<void> {
  const { alive, held, log } = engine;
  for (const record of [...alive.values()]) {
    if (record.ending === undefined) continue;
    try {
      await conclude(record, record.ending, engine);
    } catch (error) {
      const { requestId } = record.request;
      log.error("request-conclusion-failed", { requestId, error: String(error) });
      // Better lost than given away while a peer may hold them.
      if (alive.delete(requestId)) held.set(requestId, record.blockIds);
      record.settle.reject(
        KvError.from(error, "KV_ENGINE_FAILED", `request ${requestId} could not be ended`),
      );
    }
  }
}

async function conclude(
  record: RequestRecord,
  { reason, error }: NonNullable<RequestRecord["ending"]>,
  { scheduler, model, blocks, blockSize, hooks, alive, held, wakeup, log }: EngineState,
): Promise<void> {
  const { request, connectorRequest, state, blockIds, numComputedTokens } = record;
  const { requestId, promptTokens, kvTransferParams } = request;
  const used = blocksFor(numComputedTokens, blockSize);
  const ok = reason === "stopped" || reason === "length";
  if (ok && kvTransferParams !== undefined) {
    const tokens = Math.min(numComputedTokens, promptTokens.length);
    await hooks.beforeSend?.({ requestId, kvTransferParams, blockIds, tokens, forwardMs: record.forwardMs });
  }
  if (ok) cacheOutput(record, { blocks, blockSize });
  const shared = state === "waiting" ? [] : blockIds.slice(0, used);
  const finished = scheduler?.requestFinished(connectorRequest, [shared], reason) ?? { keepBlocks: false };
  alive.delete(requestId);
  record.state = "ended";
  model.dropSequence(requestId).catch((failure: unknown) => {
    log.warn("sequence-not-dropped", { requestId, error: String(failure) });
  });
  // A peer may write into the blocks of a request that waits for its KV until the workers say that it does not.
  if (state === "remote" && record.announced && finished.keepBlocks) held.set(requestId, blockIds);
  else if (finished.keepBlocks) {
    held.set(requestId, shared);
    blocks.release(blockIds.slice(shared.length));
  } else blocks.release(blockIds);
  if (error !== undefined) record.settle.reject(error);
  else {
    record.settle.resolve({
      tokens: record.output,
      finishReason: reason === "stopped" ? "stop" : "length",
      kvTransferParams: finished.kvTransferParams,
      cachedTokens: record.cachedBlocks * blockSize,
      remoteTokens: record.remoteTokens,
    });
  }
  // The workers learn of the end in a step of its own.
  wakeup.wake();
}
