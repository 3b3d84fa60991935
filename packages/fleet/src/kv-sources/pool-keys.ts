import type { Ambient } from "@kv/interface";
import { type BlockHashAlgorithm, blockHashes, offloadKey } from "@kv/tier";
import { z } from "zod";
import type { InstanceGet } from "../pairing/engine-facts.js";
import { repeat } from "../repeat.js";

/** `GET /blocks` of kv-pool. */
const contentSchema = z.object({
  peer_id: z.string().regex(/^.{1,253}:[0-9]{1,5}$/),
  draining: z.boolean(),
  hash_seed: z.string().max(4096),
  hash_algorithm: z.enum(["sha256", "sha256_cbor"]),
  block_size: z.number().int().min(1).max(8192).nullable(),
  blocks_per_chunk: z.number().int().min(1).max(65_536),
  epoch: z.string().max(64),
  next: z.number().int().nonnegative(),
  more: z.boolean(),
  changes: z.array(z.string().regex(/^[+-][A-Za-z0-9+/=]{1,128}$/)).max(2000),
});

/** What decides the keys of a prompt's blocks. */
interface Hashing {
  readonly blockSize: number;
  readonly algorithm: BlockHashAlgorithm;
  readonly seed: string;
}

/** A pool's state, for `/status`. */
export interface PoolKeysStatus {
  readonly url: string;
  /** Null before the first answer. */
  readonly peer: string | null;
  /** Why no request names it; null while requests do. */
  readonly unused: string | null;
  readonly blocks: number;
}

export interface PoolKeysOptions extends Ambient {
  readonly get: InstanceGet;
}

const ASK_EVERY_MS = 500;
const ASK_TIMEOUT_MS = 3000;
const COPY_MS = 30_000;
/** About 300 bytes each. */
const MAX_KEYS = 2 ** 20;
/** Takes about a millisecond. */
const STEP_BLOCKS = 128;

/** The keys of the blocks that a `kv-pool` has, by following its admin address. */
export class PoolKeys {
  readonly #keys = new Set<string>();
  readonly #following: { close(): void };
  #peer: string | undefined;
  #hashing: Hashing | undefined;
  #blocksPerChunk = 1;
  #unused: string | undefined = "it has not answered yet";
  #epoch = "";
  #after = 0;

  constructor(
    private readonly url: string,
    private readonly options: PoolKeysOptions,
  ) {
    this.#following = repeat(options.clock, () => this.#follow());
  }

  /** Undefined while the pool leaves, does not answer, or has nothing. */
  get peer(): string | undefined {
    const isUsed = this.#unused === undefined && this.#keys.size > 0;
    return isUsed ? this.#peer : undefined;
  }

  status(): PoolKeysStatus {
    const [peer, unused] = [this.#peer ?? null, this.#unused ?? null];
    return { url: this.url, peer, unused, blocks: this.#keys.size };
  }

  async copyFrom(peer: string): Promise<void> {
    const { get, log } = this.options;
    try {
      const post = JSON.stringify({ peer });
      const asked = { role: "prefill", url: this.url, path: "/copies", post } as const;
      const { status } = await get({ ...asked, timeoutMs: COPY_MS });
      if (status !== 200) throw new Error(`POST /copies answered ${status}`);
    } catch (error) {
      log.warn("kv-not-handed-over", { url: this.url, peer, error });
    }
  }

  close(): void {
    this.#following.close();
  }

  /**
   * In steps: how many tokens of the prompt's start the pool has. Exact, as keys are whole hashes
   * of the tokens.
   */
  *matchedTokens(tokens: ArrayLike<number>): Generator<undefined, number> {
    const hashing = this.#hashing;
    if (hashing === undefined) return 0;
    const { blockSize } = hashing;
    const whole = Math.floor(tokens.length / blockSize);
    let matched = 0;
    let after: Uint8Array | undefined;
    for (let block = 1; block <= whole; block += 1) {
      if (block % STEP_BLOCKS === 0) yield;
      const ids = Array.prototype.slice.call(tokens, (block - 1) * blockSize, block * blockSize);
      [after] = blockHashes(ids, { ...hashing, after });
      if (block % this.#blocksPerChunk !== 0) continue;
      const key = Buffer.from(offloadKey(after as Uint8Array)).toString("base64");
      if (!this.#keys.has(key)) break;
      matched = block * blockSize;
    }
    return matched;
  }

  async #follow(): Promise<number> {
    try {
      return (await this.#ask()) ? 0 : ASK_EVERY_MS;
    } catch (error) {
      this.#leaveOut(`it cannot be read: ${(error as Error).message}`);
      return ASK_EVERY_MS;
    }
  }

  async #ask(): Promise<boolean> {
    const { status, body } = await this.options.get({
      role: "prefill",
      url: this.url,
      path: `/blocks?epoch=${encodeURIComponent(this.#epoch)}&after=${this.#after}`,
      timeoutMs: ASK_TIMEOUT_MS,
    });
    if (status !== 200) throw new Error(`GET /blocks answered ${status}`);
    const content = contentSchema.parse(JSON.parse(body));
    const isSame = content.epoch === this.#epoch;
    // Otherwise it would be asked for the same page again and again.
    const isFurther = content.next > (isSame ? this.#after : 0);
    if (!isSame) this.#keys.clear();
    this.#epoch = content.epoch;
    this.#after = content.next;
    for (const change of content.changes) {
      const key = change.slice(1);
      if (change.startsWith("-")) this.#keys.delete(key);
      else if (this.#keys.size < MAX_KEYS) this.#keys.add(key);
    }

    const { block_size: blockSize, hash_algorithm: algorithm, hash_seed: seed } = content;
    this.#peer = content.peer_id;
    this.#blocksPerChunk = content.blocks_per_chunk;
    this.#hashing = blockSize === null ? undefined : { blockSize, algorithm, seed };
    if (content.draining) this.#leaveOut("it drains");
    else if (blockSize === null) this.#leaveOut("no engine has announced a block to it");
    else this.#unused = undefined;
    return content.more && isFurther;
  }

  #leaveOut(why: string): void {
    if (this.#unused !== why) this.options.log.warn("kv-pool-unused", { url: this.url, why });
    this.#unused = why;
  }
}
