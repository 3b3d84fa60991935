import { KvError, type SchedulerConnector } from "@kv/interface";
import type { BlockPool } from "./cache/block-pool.js";
import type { RequestRecord } from "./request.js";

export interface AdmissionOptions {
  readonly blocks: BlockPool;
  readonly blockSize: number;
  readonly scheduler: SchedulerConnector | undefined;
}

/** Blocks that hold `tokens` tokens. */
export function blocksFor(tokens: number, blockSize: number): number {
  return Math.ceil(tokens / blockSize);
}

/** Tokens whose KV a request will have in the pool when it ends: the last token's is never computed. */
export function tokensToHold(promptTokens: number, maxTokens: number): number {
  return promptTokens + maxTokens - 1;
}

/**
 * Gives a waiting request its blocks, for the prompt and all of its output, so that a request once admitted never lacks room. What
 * the prefix cache has is taken over, but for the last prompt token, whose logits are needed; what a peer will send is
 * asked of the connector. Answers false, with nothing taken, when there is no room now. Errors: those of `matchedTokens`;
 * `KV_REQUEST_INVALID` when the connector promises more than the prompt.
 */
export function admit(record: RequestRecord, { blocks, blockSize, scheduler }: AdmissionOptions): boolean {
  const { promptTokens, maxTokens } = record.request;
  const numPromptTokens = promptTokens.length;
  const cached = blocks.lookup(record.hashes.slice(0, Math.floor((numPromptTokens - 1) / blockSize)));
  try {
    const numComputedTokens = cached.length * blockSize;
    const matched = scheduler?.matchedTokens(record.connectorRequest, numComputedTokens) ?? {
      tokens: 0,
      async: false,
    };
    if (matched.wait === true) {
      blocks.release(cached);
      return false;
    }
    const covered = numComputedTokens + matched.tokens;
    if (matched.tokens < 0 || covered > numPromptTokens) {
      throw new KvError(
        "KV_REQUEST_INVALID",
        `a peer is to supply ${matched.tokens} tokens beyond ${numComputedTokens} of a prompt of ${numPromptTokens}`,
        { details: { remoteTokens: matched.tokens, numComputedTokens, numPromptTokens } },
      );
    }
    if (matched.tokens > 0 && !matched.async) {
      throw new KvError(
        "KV_ENGINE_FAILED",
        `connector ${scheduler?.name} loads within the forward pass, and this engine loads before it`,
      );
    }
    const total = blocksFor(tokensToHold(numPromptTokens, maxTokens), blockSize);
    const fresh = blocks.allocate(total - cached.length);
    record.blockIds = [...cached, ...fresh];
    record.cachedBlocks = cached.length;
    record.numComputedTokens = numComputedTokens;
    record.remoteTokens = matched.tokens;
    record.state = matched.tokens > 0 ? "remote" : "running";
    // The room for the output is no affair of the peer's: its blocks are those of the prompt.
    const shared = blocksFor(matched.tokens > 0 ? covered : numPromptTokens, blockSize);
    scheduler?.afterAllocation(record.connectorRequest, [record.blockIds.slice(0, shared)], matched.tokens);
    return true;
  } catch (error) {
    if (record.state === "waiting") blocks.release(cached);
    if (KvError.is(error, "KV_OUT_OF_BLOCKS")) return false;
    throw error;
  }
}
