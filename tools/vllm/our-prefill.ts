import { join } from "node:path";
import { type Log, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { zmqSideChannel } from "@kv/side-channel";
import { freePorts } from "@kv/testing/free-ports";
import { startInstance } from "../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../apps/demo/src/instance/instance-config.js";
import { handedOver } from "./completion.js";
import { PEER_DIR, type VllmServer } from "./server.js";
import { tapTransport } from "./tapped-transport.js";
import { CONNECTOR_NAMES, factorsOf, type PeerKind, prompt, TINY } from "./tiny-peer.js";
import { sleep, until } from "./until.js";

export interface OurPrefillOptions {
  readonly kind: PeerKind;
  readonly tp?: number;
  readonly blockSize?: number;
  readonly announcesPeerBlocks?: boolean;
  /** "neuron": a simulated device, staged through host memory. */
  readonly platform?: "cpu" | "neuron";
  readonly leaseSeconds: number;
  /** Of HTTP and the side channel. Default: free ones. */
  readonly ports?: readonly [number, number];
  readonly log?: Log;
}

export type OurPrefill = Awaited<ReturnType<typeof openOurPrefill>>;

const NUM_BLOCKS = 128;
/** The highest bit of a float32's exponent (little endian). */
const EXPONENT_BYTE = 3;
const EXPONENT_BIT = 0x40;

export async function openOurPrefill(options: OurPrefillOptions) {
  const {
    kind,
    tp = 1,
    blockSize = TINY.blockSize,
    announcesPeerBlocks = false,
    leaseSeconds,
    log = silentLog,
    platform = "cpu",
  } = options;
  const [port = 0, sideChannelPort = 0] = options.ports ?? (await freePorts(2));
  const factors = factorsOf(kind);
  const tap = tapTransport(nixlTransport({ log }));
  const config = readInstanceConfig({
    role: "prefill",
    name: "our-prefill",
    model: join(PEER_DIR, "tiny-qwen3"),
    servedModelName: "tiny",
    platform,
    port,
    sideChannelPort,
    tp,
    blockSize,
    numBlocks: NUM_BLOCKS,
    debug: true,
    // Plain [K|V] in each head: vLLM's D repacks it.
    attentionBackend: "PLAIN",
    compat: {
      model: factors.model,
      vllmVersion: factors.vllm_version,
      connectorVersion: factors.nixl_connector_version,
      isHmaEnabled: factors.is_hma_enabled,
      attentionBackend: factors.attn_backend_name,
    },
    kvTransferConfig: {
      kv_connector: CONNECTOR_NAMES[kind.mode],
      kv_role: "kv_producer",
      kv_buffer_device: "cpu",
      kv_connector_extra_config: {
        kv_lease_duration: leaseSeconds,
        ...(announcesPeerBlocks ? { push_announced_block_size: TINY.blockSize } : {}),
      },
    },
  });
  const instance = await startInstance(config, {
    log,
    transport: tap.transport,
    sideChannel: zmqSideChannel({ log }),
  });

  const held = () => NUM_BLOCKS - 1 - (instance.status() as { free_blocks: number }).free_blocks;
  const heads = TINY.kvHeads / tp;
  const headBytes = blockSize * TINY.contentBytes;
  return {
    url: instance.url,
    close: () => instance.close(),
    [Symbol.asyncDispose]: () => instance.close(),
    sideChannelPort,
    tap,
    held,
    freed: () => until(() => held() === 0, "our prefill side has freed the blocks"),
    /** Of the first value of K at each of the first `tokens` positions. */
    damage(blockIds: readonly number[], tokens: number): void {
      for (const { bytes } of tap.memories) {
        for (let row = 0; row < TINY.layers * heads; row++) {
          const [layer, head] = [Math.floor(row / heads), row % heads];
          for (let token = 0; token < tokens; token++) {
            const block = layer * NUM_BLOCKS + (blockIds[Math.floor(token / blockSize)] ?? 0);
            const value =
              (block * heads + head) * headBytes +
              (token % blockSize) * TINY.contentBytes +
              EXPONENT_BYTE;
            bytes[value] = (bytes[value] ?? 0) ^ EXPONENT_BIT;
          }
        }
      }
    },
  };
}

const REPACKS = "hint heterogeneous attn post process";
const REPACKS_WITHIN_MS = 120_000;

/**
 * Each worker of a push D must repack KV of another attention backend, as ours. It learns to in a
 * handshake that loads P's memory descriptors. In push only a heartbeat starts such a one; that
 * before a registration loads what a notification needs (`notif_agents_only` in
 * `nixl/push_worker.py`, vLLM 0.31 to 0.33). When the registration comes first, D generates other
 * tokens. A heartbeat is due a sixth of a lease after the last one.
 */
export async function untilRepacks(server: VllmServer): Promise<void> {
  const { kind, leaseSeconds, tp } = server;
  if (kind.mode === "pull") return;
  const allRepack = () => {
    const lines = server.log().matchAll(new RegExp(`^(\\([^)]*\\))?.*${REPACKS}`, "gm"));
    return new Set(Array.from(lines, ([, worker]) => worker)).size >= tp;
  };
  const tried = async () => {
    if (allRepack()) return true;
    await sleep((leaseSeconds * 1000) / 6);
    await using ours = await openOurPrefill({ kind, leaseSeconds });
    await handedOver(ours.url, server, prompt(40), 1);
    return allRepack();
  };
  await until(tried, `each worker of ${server.name} repacks`, { timeoutMs: REPACKS_WITHIN_MS });
}
