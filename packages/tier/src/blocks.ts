import {
  type Agent,
  type BackendSpec,
  KvError,
  type Memory,
  type PreparedList,
  type Registration,
  type Transport,
} from "@kv/interface";
import type { Region } from "./session.js";

export interface TierBlocksOptions {
  readonly transport: Transport;
  readonly backends?: readonly BackendSpec[] | undefined;
  readonly memory: Memory;
  readonly blockLengthBytes: number;
  readonly landingBlocks: number;
}

/**
 * This side's blocks, in two memories of two agents. Peers get only the metadata of the landing
 * blocks, and write there what this side fetches. They cannot reach the served blocks.
 */
export class TierBlocks {
  readonly metadata: Uint8Array;
  readonly region: Region;
  readonly #lengthBytes: number;
  readonly #landing: Memory;
  readonly #landingAgent: Agent;
  readonly #registrations: readonly Registration[];
  /** No peer writes into them. */
  readonly #free: number[];
  readonly #waiting = new Set<() => void>();

  private constructor(
    readonly writer: Agent,
    readonly slots: PreparedList,
    landing: {
      readonly memory: Memory;
      readonly agent: Agent;
      readonly metadata: Uint8Array;
      readonly lengthBytes: number;
    },
    registrations: readonly Registration[],
  ) {
    const { memory, agent, metadata, lengthBytes } = landing;
    const numBlocks = memory.lengthBytes / lengthBytes;
    this.metadata = metadata;
    this.region = { address: memory.address, numBlocks };
    this.#landing = memory;
    this.#landingAgent = agent;
    this.#lengthBytes = lengthBytes;
    this.#registrations = registrations;
    this.#free = Array.from({ length: numBlocks }, (_, at) => numBlocks - 1 - at);
  }

  /** @throws `KV_MEMORY_INVALID`, the errors of the transport. */
  static async open(options: TierBlocksOptions): Promise<TierBlocks> {
    const { transport, backends, memory, blockLengthBytes: length, landingBlocks } = options;
    const numSlots = Math.floor(memory.lengthBytes / length);
    if (numSlots < 1)
      throw new KvError(
        "KV_MEMORY_INVALID",
        `P2P tier: a memory of ${memory.lengthBytes} bytes has no block of ${length} bytes`,
      );
    const writer = await transport.createAgent({ backends });
    const landing = transport.allocate(landingBlocks * length);
    try {
      const served = await writer.register(memory);
      const slots = await writer.prepareLocal({
        memoryType: memory.memoryType,
        rows: Float64Array.of(memory.address, length, memory.deviceId, length, numSlots),
      });
      const agent = await transport.createAgent({ backends });
      const landed = await agent.register(landing);
      const metadata = await agent.localMetadata();
      return new TierBlocks(
        writer,
        slots,
        { memory: landing, agent, metadata, lengthBytes: length },
        [served, landed],
      );
    } catch (error) {
      await writer.close();
      throw error;
    }
  }

  /**
   * Takes one to `count` landing blocks. Waits while peers write into all of them.
   * @throws The signal's reason.
   */
  async take(count: number, signal: AbortSignal): Promise<number[]> {
    while (this.#free.length === 0) {
      signal.throwIfAborted();
      await new Promise<void>((resolve) => {
        const resume = () => {
          this.#waiting.delete(resume);
          signal.removeEventListener("abort", resume);
          resolve();
        };
        this.#waiting.add(resume);
        signal.addEventListener("abort", resume);
      });
    }
    signal.throwIfAborted();
    return this.#free.splice(-Math.min(count, this.#free.length));
  }

  giveBack(indexes: readonly number[]): void {
    this.#free.push(...indexes);
    for (const resume of this.#waiting) resume();
  }

  landed(index: number): Uint8Array {
    return this.#landing.view(index * this.#lengthBytes, this.#lengthBytes);
  }

  async close(): Promise<void> {
    await this.slots.close();
    for (const registration of this.#registrations) await registration.close();
    await this.writer.close();
    await this.#landingAgent.close();
    this.#landing.close();
  }
}
