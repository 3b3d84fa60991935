import { readTransferConfig } from "@kv/connector";
import { delegateTo } from "@kv/connector/building-blocks";
import { type ConnectorRequest, type FailedReceive, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type HeadlessDecode, openHeadlessDecode as openDecode } from "@kv/peer";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import { engineIdentity } from "@kv/testing/engine-identity";
import { CONNECTOR_NAMES, factorsOf, type PeerKind, TINY } from "./tiny-peer.js";

export { type HeadlessDecode, UNWRITTEN_BYTE as UNTOUCHED } from "@kv/peer";

export interface HeadlessDecodeOptions {
  readonly kind: PeerKind;
  readonly tp?: number;
  /** In the compatibility hash. Default: that of vLLM on the CPU. */
  readonly dtype?: string;
  readonly extra?: Readonly<Record<string, unknown>>;
}

const NUM_BLOCKS = 16;
/** Far apart and out of order: blocks that land in the wrong place are seen. */
export const OUR_BLOCKS = [5, 2, 9, 11];

/** Of the tiny model's cache. */
export async function openHeadlessDecode(options: HeadlessDecodeOptions): Promise<HeadlessDecode> {
  const { kind, tp = 1, extra = {} } = options;
  const sideChannel = zmqSideChannel();
  const factors = factorsOf(kind);
  const transport = nixlTransport();
  const layers = Array.from({ length: TINY.layers }, (_, layer) => TINY.layerName(layer));
  const blockLengthBytes = (TINY.kvHeads / tp) * TINY.blockSize * TINY.contentBytes;
  const decode = await openDecode({
    transport,
    sideChannel,
    config: readTransferConfig(
      {
        kv_connector: CONNECTOR_NAMES[kind.mode],
        kv_role: "kv_consumer",
        kv_buffer_device: "cpu",
        kv_connector_extra_config: extra,
      },
      { env: { VLLM_NIXL_SIDE_CHANNEL_HOST: "127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT: "0" } },
    ),
    engine: engineIdentity(`headless-decode-${crypto.randomUUID()}`, {
      tpSize: tp,
      model: factors.model,
      vllmVersion: factors.vllm_version,
      connectorVersion: factors.nixl_connector_version,
      isHmaEnabled: factors.is_hma_enabled,
      speculativeConfig: factors.speculative_config,
    }),
    cache: {
      groups: [{ kind: "full", layerNames: layers }],
      blockSize: TINY.blockSize,
      physicalBlocksPerLogical: 1,
      numKvHeads: factors.num_kv_heads,
      headSize: factors.head_size,
      numHiddenLayers: factors.num_hidden_layers,
      dtype: options.dtype ?? factors.dtype,
      cacheDtype: factors.cache_dtype,
      layout: "LBHNC",
      attentionBackend: factors.attn_backend_name,
    },
    connector: kind.mode === "push" ? pushConnector : pullConnector,
    regions: layers.map((name) => ({ name, numBlocks: NUM_BLOCKS, blockLengthBytes, groupId: 0 })),
    log: silentLog,
  });
  return delegateTo(decode, {
    async close() {
      await decode.close();
      await sideChannel.close();
      await transport.close();
    },
  });
}

/** @throws A failure, with its code. */
export async function receiveAll(
  decode: HeadlessDecode,
  asked: ConnectorRequest,
  blocks: readonly number[] = OUR_BLOCKS,
  numComputedTokens = 0,
): Promise<void> {
  const { failure } = await decode.receive(asked, [blocks], { numComputedTokens });
  if (failure !== undefined) throw Object.assign(new Error(failure.message), failure);
}

export const isTimeout = (error: unknown) =>
  (error as FailedReceive).code === "KV_SIDE_CHANNEL_TIMEOUT";
