import { zmqSideChannel } from "@kv/connector";
import { type Log, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type Instance, startInstance } from "../../apps/demo/src/instance/instance.js";
import { readInstanceConfig } from "../../apps/demo/src/instance/instance-config.js";
import { freePorts } from "./free-ports.js";
import { type TappedTransport, tapTransport } from "./tapped-transport.js";
import { CONNECTOR_NAMES, factorsOf, type PeerKind, TINY } from "./tiny-peer.js";

export interface OurPrefillOptions {
  /** The vLLM that it shall pair with. */
  readonly kind: PeerKind;
  readonly tp?: number;
  /** The peer's unless it says otherwise. */
  readonly blockSize?: number;
  /** The engine's blocks are on a simulated device and staged through host memory with "neuron". */
  readonly platform?: "cpu" | "neuron";
  readonly leaseSeconds: number;
  /** HTTP and side channel; free ones when absent. */
  readonly ports?: readonly [number, number];
  readonly log?: Log;
}

/** The demo's prefill server in this process: its own model and cache, NIXL, HTTP, and settings that let a vLLM peer pair with it. */
export interface OurPrefill {
  readonly instance: Instance;
  readonly url: string;
  readonly sideChannelPort: number;
  readonly tap: TappedTransport;
  /** Blocks that requests hold, leases and all. */
  held(): number;
  /** Turns a bit of the exponent of the first value of K, of each of the first `tokens` positions in each head and layer. */
  damage(blockIds: readonly number[], tokens: number): void;
}

const NUM_BLOCKS = 128;
/** The second highest bit of a float32's exponent, in its last byte (little endian). */
const EXPONENT_BYTE = 3;
const EXPONENT_BIT = 0x40;

export async function openOurPrefill(options: OurPrefillOptions): Promise<OurPrefill> {
  const {
    kind,
    tp = 1,
    blockSize = TINY.blockSize,
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
    servedModelName: "tiny",
    platform,
    port,
    sideChannelPort,
    tp,
    blockSize,
    numBlocks: NUM_BLOCKS,
    // Plain [K|V] in a head; vLLM's decode worker repacks what does not come from its own backend.
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
      kv_connector_extra_config: { kv_lease_duration: leaseSeconds },
    },
  });
  const instance = await startInstance(config, {
    log,
    transport: tap.transport,
    sideChannel: zmqSideChannel({ log }),
  });

  const heads = TINY.kvHeads / tp;
  const headBytes = blockSize * TINY.contentBytes;
  return {
    instance,
    url: instance.url,
    sideChannelPort,
    tap,
    held: () => NUM_BLOCKS - 1 - (instance.status() as { free_blocks: number }).free_blocks,
    damage(blockIds, tokens) {
      for (const { bytes } of tap.memories) {
        for (let row = 0; row < TINY.layers * heads; row++) {
          const [layer, head] = [Math.floor(row / heads), row % heads];
          for (let token = 0; token < tokens; token++) {
            const block = layer * NUM_BLOCKS + (blockIds[Math.floor(token / blockSize)] ?? 0);
            const value =
              (block * heads + head) * headBytes + (token % blockSize) * TINY.contentBytes + EXPONENT_BYTE;
            bytes[value] = (bytes[value] ?? 0) ^ EXPONENT_BIT;
          }
        }
      }
    },
  };
}
