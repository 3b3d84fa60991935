import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeReply,
  encodeHandshakePayload,
} from "@kv/protocol";
import { createRecording } from "../src/recording/recording.js";

const frames = new URL("../../protocol/fixtures/wire/handshake/", import.meta.url);
const frame = (name: string) => new Uint8Array(readFileSync(new URL(name, frames)));

/** A handshake of a real vLLM 0.33 prefill server with TP 1: 4 regions, blocks of 32 tokens. */
export const REQUEST = frame("v33_pull_p1.pp0tp0.req.bin");
export const REPLY = [
  frame("v33_pull_p1.pp0tp0.rep0.bin"),
  frame("v33_pull_p1.pp0tp0.rep1.bin"),
] as const;
const PAYLOAD = decodeHandshakeReply(REPLY).payload;
export const METADATA = decodeAgentMetadata(PAYLOAD.agentMetadataBytes);

/** Bytes that differ from block to block, region to region and prompt to prompt. */
export function kvOf(prompt: number, blocks: number): Uint8Array {
  const lengths = METADATA.blockLengthsBytes.flatMap((length) =>
    Array<number>(blocks).fill(length),
  );
  const bytes = new Uint8Array(lengths.reduce((sum, length) => sum + length, 0));
  let offset = 0;
  for (const [index, length] of lengths.entries()) {
    for (let at = 0; at < length; at++)
      bytes[offset + at] = (31 * (prompt + 1) + 7 * index + at) % 251;
    offset += length;
  }
  return bytes;
}

export const tokensOf = (length: number) => Array.from({ length }, (_, at) => 10 + (at % 50));

/**
 * The factors of the samples' compatibility hash. The recorded hash contains a path of the
 * recording machine.
 */
export const FACTORS = {
  attn_backend_name: "CPU_ATTN",
  cache_dtype: "auto",
  dtype: "torch.float32",
  head_size: 32,
  is_hma_enabled: true,
  model: "tiny-qwen3",
  nixl_connector_version: 15,
  num_hidden_layers: 4,
  num_kv_heads: 4,
  speculative_config: null,
  transfer_mode: "pull",
  vllm_version: "0.33.0",
} as const;

/** The recorded payload with the hash of other factors. */
export function withFactors(factors: Readonly<Record<string, unknown>>): Uint8Array {
  return encodeHandshakePayload({
    ...PAYLOAD,
    compatibilityHash: compatibilityHash({ ...FACTORS, ...factors }),
  });
}

interface Sample {
  readonly ranks: readonly {
    readonly request: Uint8Array;
    readonly reply: readonly Uint8Array[];
  }[];
  readonly engineId: string;
  readonly mode: "pull" | "push";
  readonly prompts: readonly {
    readonly tokens: number[];
    readonly blockIds: number[][];
    readonly kv: Uint8Array;
  }[];
}

/** Writes a recording; resolves with its folder. */
export async function writeRecording({ ranks, engineId, mode, prompts }: Sample): Promise<string> {
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-test-"));
  const writer = createRecording(folder);
  const files = ranks.map(async ({ request, reply }, tpRank) => ({
    tpRank,
    request: await writer.frame(`p.pp0tp${tpRank}.req.bin`, request),
    reply: await Promise.all(
      reply.map((bytes, at) => writer.frame(`p.pp0tp${tpRank}.rep${at}.bin`, bytes)),
    ),
  }));
  const recorded = prompts.map(async ({ tokens, blockIds, kv }, index) => ({
    tokens,
    params: {
      do_remote_prefill: true,
      do_remote_decode: false,
      remote_block_ids: blockIds,
      remote_engine_id: engineId,
      remote_request_id: `cmpl-${index}`,
      remote_host: "127.0.0.1",
      remote_port: 5600,
      tp_size: ranks.length,
      remote_num_tokens: tokens.length,
      transfer_mode: mode,
    },
    kv: await writer.kv(`prompt-${index}.bin`, kv),
    notification: `cmpl-${index}:1`,
  }));
  await writer.finish({
    version: 1,
    tpSize: ranks.length,
    prefill: { vllmVersion: "0.33.0", model: "tiny-qwen3", ranks: await Promise.all(files) },
    prompts: await Promise.all(recorded),
  });
  return folder;
}

/** A recording with that handshake and one prompt per length. */
export function sampleRecording(
  lengths: readonly number[],
  change: (bytes: Uint8Array) => void = () => {},
  factors: Readonly<Record<string, unknown>> = {},
): Promise<string> {
  const prompts = lengths.map((length, index) => {
    const blocks = Math.ceil(length / METADATA.blockSize);
    const kv = kvOf(index, blocks);
    change(kv);
    const blockIds = [Array.from({ length: blocks }, (_, block) => block + 3)];
    return { tokens: tokensOf(length), blockIds, kv };
  });
  const ranks = [{ request: REQUEST, reply: [withFactors(factors), REPLY[1]] }];
  const mode = (factors.transfer_mode ?? FACTORS.transfer_mode) as Sample["mode"];
  return writeRecording({ ranks, engineId: METADATA.engineId, mode, prompts });
}
