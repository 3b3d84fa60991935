import type { Transport } from "@kv/interface";
import { encodeMsgpack } from "@kv/protocol";
import { type ZmqConnection, zmqSideChannel } from "@kv/side-channel";
import { held } from "@kv/testing/nothing-left";
import { type MemoryNetwork, memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { afterEach, expect, vi } from "vitest";
import { type BlockStore, openTier, type Tier, type TierOptions } from "../src/index.js";
import { decodeMessage, type TierMessage } from "../src/messages.js";

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

/** Members of one network; after each test nothing is left of them. */
export function tierScene(options?: Parameters<typeof memoryNetwork>[0]) {
  const network = memoryNetwork(options);
  const open: { close(): Promise<void> }[] = [];
  const stores: NamedBlocks[] = [];
  let hosts = 0;

  async function member(fill = 10, options: Partial<TierOptions> = {}) {
    hosts += 1;
    const opened = await openMember(network, `host-${hosts}`, fill, options);
    open.push(opened);
    stores.push(opened.store);
    return opened;
  }

  /** A peer with memory of its own, which says what a test tells it to. */
  async function peer(given: { answer?: () => Promise<undefined> | undefined } = {}) {
    hosts += 1;
    const transport = memoryTransport({ network, host: `peer-${hosts}` });
    const agent = await transport.createAgent();
    const memory = transport.allocate(4 * BLOCK_BYTES);
    const registration = await agent.register(memory);
    const sideChannel = zmqSideChannel({ maxRequestBytes: 8 * 2 ** 20 });
    const received: TierMessage[] = [];
    const listener = await sideChannel.listen({
      host: "127.0.0.1",
      port: 0,
      answer: ([bytes]) => {
        if (bytes !== undefined) received.push(decodeMessage(bytes));
        return given.answer?.();
      },
    });
    const peerId = `127.0.0.1:${listener.port}`;
    let dialed: ZmqConnection | undefined;
    open.push({
      async close() {
        dialed?.close();
        await sideChannel.close();
        await registration.close();
        await agent.close();
        memory.close();
        await transport.close();
      },
    });
    const send = (message: object) => dialed?.send([encodeMsgpack(message)]);
    const metadata = await agent.localMetadata();
    return {
      peerId,
      send,
      types: () => received.map(({ type }) => type),
      /** Waits for a message. */
      async got<Type extends TierMessage["type"]>(type: Type) {
        const found = () => received.find((message) => message.type === type);
        await vi.waitFor(() => expect(found()).toBeDefined(), { timeout: 5000 });
        return found() as Extract<TierMessage, { type: Type }>;
      },
      async dial(to: string): Promise<void> {
        const [host = "", port] = to.split(":");
        dialed = sideChannel.dial({ host, port: Number(port), identity: peerId });
        const connection = dialed;
        await new Promise<void>((resolve) => {
          connection.onEstablished = resolve;
        });
      },
      connect: (given: object = {}) =>
        send({
          type: "connect",
          peer_id: peerId,
          agent_metadata: metadata,
          base_addr: memory.address,
          num_blocks: 4,
          block_len: BLOCK_BYTES,
          config_fingerprint: NAMESPACE.fingerprint,
          hash_seed: NAMESPACE.hashSeed,
          ...given,
        }),
      end(how: "politely" | "by force"): void {
        if (how === "politely") send({ type: "disconnect" });
        else void Promise.all([dialed?.close(), sideChannel.close()]);
      },
    };
  }

  afterEach(async () => {
    for (const { close } of open.splice(0).reverse()) await close();
    expect(held(network.outstanding())).toEqual({});
    for (const { pinned } of stores.splice(0)) expect(pinned).toBe(0);
  });
  return { member, peer };
}

export type Member = Awaited<ReturnType<typeof openMember>>;
export type Peer = Awaited<ReturnType<ReturnType<typeof tierScene>["peer"]>>;
