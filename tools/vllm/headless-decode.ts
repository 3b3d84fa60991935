import { readTransferConfig, zmqSideChannel } from "@kv/connector";
import {
  type ConnectorRequest,
  type EngineIdentity,
  type FailedReceive,
  type KvCacheConfig,
  type KvTransferParams,
  type Log,
  silentLog,
} from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { openHeadlessDecode as openDecode } from "@kv/peer";
import { FACTORS, TINY } from "./tiny-peer.js";

export { UNTOUCHED } from "@kv/peer";

export interface HeadlessDecodeOptions {
  readonly tp?: number;
  /** Instead of vLLM's on the CPU, as it enters the compatibility hash. */
  readonly dtype?: string;
  readonly log?: Log;
}

/** The headless decode engine of `@kv/peer` in the shape of the live tests' model, with one KV cache group. */
export interface HeadlessDecode {
  receive(
    request: ConnectorRequest,
    blockIds: readonly number[],
    options?: { readonly numComputedTokens?: number },
  ): Promise<{ readonly failure: FailedReceive | undefined }>;
  giveUpQueued(request: ConnectorRequest): void;
  finish(request: ConnectorRequest, blockIds: readonly number[]): void;
  /** Bytes of a block of a layer on one rank. */
  block(tpRank: number, layer: number, blockId: number): Uint8Array;
  outstanding(): Readonly<Record<string, number>>;
  close(): Promise<void>;
}

const NUM_BLOCKS = 16;
export function requestOf(
  requestId: string,
  numPromptTokens: number,
  kvTransferParams: KvTransferParams | null | undefined,
): ConnectorRequest {
  return { requestId, numPromptTokens, kvTransferParams: kvTransferParams ?? undefined };
}

export async function openHeadlessDecode(options: HeadlessDecodeOptions = {}): Promise<HeadlessDecode> {
  const { tp = 1, dtype = FACTORS.dtype, log = silentLog } = options;
  const transport = nixlTransport({ log });
  const sideChannel = zmqSideChannel({ log });
  const config = readTransferConfig(
    { kv_connector: "NixlConnector", kv_role: "kv_consumer", kv_buffer_device: "cpu" },
    { env: { VLLM_NIXL_SIDE_CHANNEL_HOST: "127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "0" }, log },
  );
  const layers = Array.from({ length: TINY.layers }, (_, layer) => TINY.layerName(layer));
  const cache: KvCacheConfig = {
    groups: [{ kind: "full", layerNames: layers }],
    blockSize: TINY.blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads: FACTORS.num_kv_heads,
    headSize: FACTORS.head_size,
    numHiddenLayers: FACTORS.num_hidden_layers,
    dtype,
    cacheDtype: FACTORS.cache_dtype,
    layout: "LBHNC",
    attentionBackend: FACTORS.attn_backend_name,
  };
  const engine: EngineIdentity = {
    engineId: `headless-decode-${process.pid}-tp${tp}`,
    tpSize: tp,
    ppSize: 1,
    dpRank: 0,
    model: {
      model: FACTORS.model,
      vllmVersion: FACTORS.vllm_version,
      connectorVersion: FACTORS.nixl_connector_version,
      isHmaEnabled: FACTORS.is_hma_enabled,
      speculativeConfig: FACTORS.speculative_config,
    },
  };
  const blockLengthBytes = (TINY.kvHeads / tp) * TINY.blockSize * TINY.contentBytes;
  const decode = await openDecode({
    transport,
    sideChannel,
    config,
    engine,
    cache,
    regions: layers.map((name) => ({ name, numBlocks: NUM_BLOCKS, blockLengthBytes, groupId: 0 })),
    log,
  });
  return {
    async receive(request, blockIds, options) {
      const { failure } = await decode.receive(request, [blockIds], options);
      return { failure };
    },
    giveUpQueued: (request) => decode.giveUpQueued(request),
    finish: (request, blockIds) => decode.finish(request, [blockIds]),
    block: (tpRank, layer, blockId) => decode.block(tpRank, layer, blockId),
    outstanding: () => decode.outstanding(),
    async close() {
      await decode.close();
      await sideChannel.close();
      await transport.close();
    },
  };
}
