import type { Transport } from "@kv/interface";
import { type MemoryNetwork, memoryTransport } from "@kv/transport-memory";
import { type BlockStore, openTier, type Tier, type TierOptions } from "../src/index.js";

export const BLOCK_BYTES = 4096;
export const NAMESPACE = {
  blockLengthBytes: BLOCK_BYTES,
  fingerprint: "6357ff6e9f34c0a7",
  hashSeed: "vllm",
};

/** A key as vLLM makes it: a hash, and the group in four bytes. */
export const keyOf = (name: string): Uint8Array =>
  Buffer.concat([Buffer.from(name), new Uint8Array(4)]);

/** A store whose blocks are named, and which counts its pins. */
export class NamedBlocks implements BlockStore {
  readonly slots = new Map<string, number>();
  pinned = 0;
  /** What a look-up waits for. */
  ready: Promise<void> = Promise.resolve();

  async pin(keys: readonly Uint8Array[]): Promise<(number | undefined)[]> {
    await this.ready;
    const found = keys.map((key) =>
      this.slots.get(Buffer.from(key.subarray(0, -4)).toString("latin1")),
    );
    this.pinned += found.filter((slot) => slot !== undefined).length;
    return found;
  }

  unpin(slots: readonly number[]): void {
    this.pinned -= slots.length;
  }
}

/** A member of the tier with 16 blocks; block `i` holds `fill + i` in each byte. */
export async function openMember(
  network: MemoryNetwork,
  host: string,
  fill: number,
  options: Partial<TierOptions> = {},
): Promise<{ tier: Tier; store: NamedBlocks; transport: Transport; close(): Promise<void> }> {
  const transport = memoryTransport({ network, host });
  const memory = transport.allocate(16 * BLOCK_BYTES);
  for (let slot = 0; slot < 16; slot += 1)
    memory.bytes.fill(fill + slot, slot * BLOCK_BYTES, (slot + 1) * BLOCK_BYTES);
  const store = new NamedBlocks();
  const tier = await openTier({
    transport,
    host: "127.0.0.1",
    port: 0,
    memory,
    store,
    ...NAMESPACE,
    ...options,
  });
  return {
    tier,
    store,
    transport,
    async close() {
      await tier.close();
      memory.close();
      await transport.close();
    },
  };
}

/** Reads blocks, and returns the byte that each is full of. */
export async function readFills(
  from: Tier,
  peerId: string,
  names: readonly string[],
  signal?: AbortSignal,
): Promise<(number | undefined)[]> {
  const fills: (number | undefined)[] = [];
  await from.read(
    peerId,
    names.map(keyOf),
    (_, bytes) => {
      fills.push(bytes.every((byte) => byte === bytes[0]) ? bytes[0] : undefined);
    },
    { signal },
  );
  return fills;
}
