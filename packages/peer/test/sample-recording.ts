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

/** Writes a recording with that handshake and one prompt per length; resolves with its folder. */
export async function sampleRecording(
  lengths: readonly number[],
  change: (bytes: Uint8Array) => void = () => {},
  factors: Readonly<Record<string, unknown>> = {},
): Promise<string> {
  const folder = mkdtempSync(join(tmpdir(), "kv-peer-test-"));
  const writer = createRecording(folder);
  const prompts = await Promise.all(
    lengths.map(async (length, index) => {
      const blocks = Math.ceil(length / METADATA.blockSize);
      const bytes = kvOf(index, blocks);
      change(bytes);
      return {
        tokens: tokensOf(length),
        params: {
          do_remote_prefill: true,
          do_remote_decode: false,
          remote_block_ids: [Array.from({ length: blocks }, (_, block) => block + 3)],
          remote_engine_id: METADATA.engineId,
          remote_request_id: `cmpl-${index}`,
          remote_host: "127.0.0.1",
          remote_port: 5600,
          tp_size: 1,
          remote_num_tokens: length,
          transfer_mode: factors.transfer_mode ?? FACTORS.transfer_mode,
        },
        kv: await writer.kv(`prompt-${index}.bin`, bytes),
        notification: `cmpl-${index}:1`,
      };
    }),
  );
  const reply = await Promise.all(
    [withFactors(factors), REPLY[1]].map((bytes, index) =>
      writer.frame(`p.pp0tp0.rep${index}.bin`, bytes),
    ),
  );
  const request = await writer.frame("p.pp0tp0.req.bin", REQUEST);
  await writer.finish({
    version: 1,
    tpSize: 1,
    prefill: { vllmVersion: "0.33.0", model: "tiny-qwen3", ranks: [{ tpRank: 0, request, reply }] },
    prompts,
  });
  return folder;
}
