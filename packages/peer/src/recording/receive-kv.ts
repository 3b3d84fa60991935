import { ambient, type BlockIds, KvError, type KvTransferParams } from "@kv/interface";
import type { RemotePrefillParams } from "@kv/protocol";
import type { Reach } from "../headless/headless-engine.js";
import { type MatchingDecode, openMatchingDecode } from "../headless/matching-decode.js";
import { kernelBlocksOfRegion } from "../protocol/region-blocks.js";
import { decodeRequestId } from "../protocol/remote-prefill.js";

export interface PrefilledPrompt {
  readonly tokens: readonly number[];
  readonly params: KvTransferParams;
  readonly remote: RemotePrefillParams;
}

/**
 * Receives the KV of a prompt into a headless decode engine of its own and copies it out: rank
 * after rank, within a rank region after region, within a region the request's kernel blocks.
 *
 * @throws those of `openMatchingDecode`; the code of the failed receive.
 */
export async function receiveKv(
  { tokens, params, remote }: PrefilledPrompt,
  reach: Reach,
): Promise<Uint8Array> {
  const matching = await openMatchingDecode(remote, 1, reach);
  const { decode } = matching;
  try {
    const blockIds = consecutiveIds(remote.remoteBlockIds);
    const request = {
      requestId: decodeRequestId(remote, ambient(reach).random),
      numPromptTokens: tokens.length,
      promptTokenIds: tokens,
      kvTransferParams: params,
    };
    const { failure } = await decode.receive(request, blockIds);
    if (failure !== undefined) throw new KvError(failure.code, failure.message);
    const kv = copyBlocks(matching, remote.tpSize, blockIds);
    decode.finish(request, blockIds);
    return kv;
  } finally {
    await decode.close();
  }
}

function consecutiveIds(like: BlockIds): BlockIds {
  let next = 1;
  return like.map((ids) => ids.map(() => next++));
}

function copyBlocks(
  { decode, metadata }: MatchingDecode,
  tpSize: number,
  blockIds: BlockIds,
): Uint8Array {
  const blocks: Uint8Array[] = [];
  for (let tpRank = 0; tpRank < tpSize; tpRank++) {
    for (const region of metadata.baseAddresses.keys()) {
      for (const id of kernelBlocksOfRegion(metadata, region, blockIds))
        blocks.push(decode.block(tpRank, region, id));
    }
  }
  // A copy of its own: the blocks are views of memory that is freed next.
  return new Uint8Array(Buffer.concat(blocks));
}
