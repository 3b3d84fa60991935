import { readTransferConfig } from "@kv/connector";
import {
  type ConnectorRequest,
  type EngineIdentity,
  type KvCacheConfig,
  type KvTransferParams,
  type Log,
  type SideChannel,
  silentLog,
} from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { openHeadlessDecode as openDecode } from "@kv/peer";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import { CONNECTOR_NAMES, factorsOf, type PeerKind, TINY } from "./tiny-peer.js";

export { UNWRITTEN_BYTE as UNTOUCHED } from "@kv/peer";

export interface HeadlessDecodeOptions {
  readonly kind: PeerKind;
  readonly tp?: number;
  /** In the compatibility hash. Default: that of vLLM on the CPU. */
  readonly dtype?: string;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly sideChannel?: SideChannel;
  readonly log?: Log;
}

export type HeadlessDecode = Awaited<ReturnType<typeof openHeadlessDecode>>;

const NUM_BLOCKS = 16;

export function requestOf(
  requestId: string,
  numPromptTokens: number,
  kvTransferParams: KvTransferParams | null | undefined,
): ConnectorRequest {
  return { requestId, numPromptTokens, kvTransferParams: kvTransferParams ?? undefined };
}

/** `@kv/peer`'s engine for the tiny model. */
export async function openHeadlessDecode(options: HeadlessDecodeOptions) {
  const {
    kind,
    tp = 1,
    log = silentLog,
    extra = {},
    sideChannel = zmqSideChannel({ log }),
  } = options;
  const factors = factorsOf(kind);
  const { dtype = factors.dtype } = options;
  const transport = nixlTransport({ log });
  const config = readTransferConfig(
    {
      kv_connector: CONNECTOR_NAMES[kind.mode],
      kv_role: "kv_consumer",
      kv_buffer_device: "cpu",
      kv_connector_extra_config: extra,
    },
    { env: { VLLM_NIXL_SIDE_CHANNEL_HOST: "127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "0" }, log },
  );
  const layers = Array.from({ length: TINY.layers }, (_, layer) => TINY.layerName(layer));
  const cache: KvCacheConfig = {
    groups: [{ kind: "full", layerNames: layers }],
    blockSize: TINY.blockSize,
    physicalBlocksPerLogical: 1,
    numKvHeads: factors.num_kv_heads,
    headSize: factors.head_size,
    numHiddenLayers: factors.num_hidden_layers,
    dtype,
    cacheDtype: factors.cache_dtype,
    layout: "LBHNC",
    attentionBackend: factors.attn_backend_name,
  };
  const engine: EngineIdentity = {
    engineId: `headless-decode-${crypto.randomUUID()}`,
    tpSize: tp,
    ppSize: 1,
    dpRank: 0,
    model: {
      model: factors.model,
      vllmVersion: factors.vllm_version,
      connectorVersion: factors.nixl_connector_version,
      isHmaEnabled: factors.is_hma_enabled,
      speculativeConfig: factors.speculative_config,
    },
  };
  const blockLengthBytes = (TINY.kvHeads / tp) * TINY.blockSize * TINY.contentBytes;
  const decode = await openDecode({
    transport,
    sideChannel,
    config,
    engine,
    cache,
    connector: kind.mode === "push" ? pushConnector : pullConnector,
    regions: layers.map((name) => ({ name, numBlocks: NUM_BLOCKS, blockLengthBytes, groupId: 0 })),
    log,
  });
  return {
    receive: (
      request: ConnectorRequest,
      blockIds: readonly number[],
      given?: { readonly numComputedTokens?: number; readonly signal?: AbortSignal },
    ) => decode.receive(request, [blockIds], given),
    queue: (request: ConnectorRequest) => decode.queue(request),
    giveUpQueued: (request: ConnectorRequest) => decode.giveUpQueued(request),
    finish: (request: ConnectorRequest, blockIds: readonly number[]) =>
      decode.finish(request, [blockIds]),
    block: (tpRank: number, layer: number, blockId: number) => decode.block(tpRank, layer, blockId),
    outstanding: () => decode.outstanding(),
    async close() {
      await decode.close();
      await sideChannel.close();
      await transport.close();
    },
  };
}
