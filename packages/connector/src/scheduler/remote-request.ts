import { type BlockIds, KvError, type KvTransferParams } from "@kv/interface";
import { blocksDigest, parseTransferParams, type RemotePrefillParams, type TransferMode } from "@kv/protocol";
import { traceMember } from "../tracing/spans.js";
import type { RemoteRequest } from "./step-types.js";

/**
 * Reads the P that computes a request's prompt, and the other values of `kv_transfer_params`. A missing mode is the connector's own
 * mode. `numPromptTokens` bounds P's tokens and the block ids: a block holds at least one token. Errors: `KV_REQUEST_INVALID`, naming the key and
 * its value.
 */
export function readRemoteRequest(
  params: KvTransferParams,
  mode: TransferMode,
  numPromptTokens = Number.POSITIVE_INFINITY,
): { readonly remote: RemoteRequest; readonly parsed: RemotePrefillParams } {
  const parsed = parseTransferParams(params, mode);
  if (parsed.kind !== "remote-prefill") {
    throw new KvError("KV_REQUEST_INVALID", "kv_transfer_params do not ask for a remote prefill", {
      hint: "pass the kv_transfer_params of the prefill answer on unchanged",
    });
  }
  if (parsed.transferMode !== mode) {
    throw new KvError(
      "KV_REQUEST_INVALID",
      `kv_transfer_params: transfer_mode is "${parsed.transferMode}", this connector is "${mode}"`,
      { hint: "use the same connector on prefill and decode workers" },
    );
  }
  requireSamePrompt(parsed.remoteNumTokens, numPromptTokens);
  requireBlocks(parsed.remoteBlockIds, numPromptTokens);
  const remote: RemoteRequest = {
    engineId: parsed.remoteEngineId,
    host: parsed.remoteHost,
    port: parsed.remotePort,
    tpSize: parsed.tpSize,
    dcpSize: parsed.dcpSize,
    ppSize: parsed.ppSize,
    registrationGeneration: parsed.remoteRegistrationGeneration,
    requestId: parsed.remoteRequestId,
    lease: parsed.lease,
    ...traceMember(parsed.lease?.traceparent),
    ...(parsed.remoteBlockIds.length === 0
      ? {}
      : { blocks: blocksDigest(parsed.remoteBlockIds, parsed.remoteNumTokens) }),
  };
  return { remote, parsed };
}

/**
 * P computes no more than the prompt, so a D with fewer tokens has another prompt, such as a placeholder. vLLM's D reads the last blocks then, and
 * answers from the KV of other tokens. Errors: `KV_REQUEST_INVALID` with both numbers.
 */
function requireSamePrompt(remoteNumTokens: number | undefined, numPromptTokens: number): void {
  if (remoteNumTokens === undefined || remoteNumTokens <= numPromptTokens) return;
  throw new KvError(
    "KV_REQUEST_INVALID",
    `kv_transfer_params: remote_num_tokens is ${remoteNumTokens}, and the prompt has ${numPromptTokens} tokens: the prefill worker computed another prompt`,
    {
      hint: "send the decode worker the prompt of the prefill request, or the prefill answer's prompt_token_ids",
      details: { key: "remote_num_tokens", remoteNumTokens, numPromptTokens },
    },
  );
}

/** Block 0 may occur often: vLLM puts its null block where a sliding window has no block. */
const NULL_BLOCK = 0;

/** Errors: `KV_REQUEST_INVALID` for more blocks than the prompt has tokens, and for a block that a group names twice. */
function requireBlocks(blockIds: BlockIds, numPromptTokens: number): void {
  for (const [group, ids] of blockIds.entries()) {
    if (ids.length > numPromptTokens) {
      throw invalidBlocks(
        group,
        `${ids.length} ids, the prompt has ${numPromptTokens} tokens and needs fewer blocks`,
      );
    }
    const seen = new Set<number>();
    for (const id of ids) {
      if (seen.has(id) && id !== NULL_BLOCK) throw invalidBlocks(group, `block ${id} twice`);
      seen.add(id);
    }
  }
}

function invalidBlocks(group: number, what: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `kv_transfer_params: remote_block_ids[${group}] has ${what}`, {
    hint: "pass the kv_transfer_params of the prefill answer on unchanged",
    details: { key: "remote_block_ids", group },
  });
}

/**
 * The P to notify that a request's blocks will not be used, after its parameters were refused. Undefined when the parameters contain no valid
 * address.
 */
export function addressToNotify(params: KvTransferParams, mode: TransferMode): RemoteRequest | undefined {
  const addressOnly = {
    ...params,
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [],
    remote_num_tokens: null,
    remote_blocks_expiry_time: null,
  };
  try {
    return readRemoteRequest(addressOnly, mode).remote;
  } catch {
    return undefined;
  }
}
