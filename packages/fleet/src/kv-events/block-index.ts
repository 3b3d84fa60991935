import type { Instance } from "../instances/instance.js";
import { getOrAdd } from "../instances/pooled-instance.js";
import { BlockHashes } from "./block-hashes.js";
import { type BlockGeometry, type BlockTree, tokensHash } from "./block-tree.js";
import type { CacheGroup, RemovedBlocks, StoredBlocks } from "./kv-event-batch.js";

interface Group extends CacheGroup {
  readonly blockSize: number;
}

const MAX_GROUPS = 32;

/** Takes less than a millisecond. */
const STEP_BLOCKS = 256;

const MAX_WAITING = 10_000;

/** Work in steps, between which others may run. */
export type Steps = Generator<undefined, void>;

interface Run {
  readonly hashes: readonly string[];
  readonly tokens: readonly number[];
}

/** The blocks of the tree in one instance's prefix cache, from its KV events. */
export class BlockIndex {
  #holder: number;
  readonly #maxBlocks: number;
  #blocks = new BlockHashes();
  readonly #groups = new Map<number, Group>();
  refused = 0;
  /** Blocks at two places, which no correct publisher reports. */
  contradictions = 0;
  /** How many tokens after a block its hash covers. */
  #lookahead = 0;
  /**
   * Runs whose parent's event was missed and may come again, by the parent's hash, oldest first.
   */
  readonly #waiting = new Map<string, Run[]>();
  #waitingBlocks = 0;

  /** `tree` serves all instances. Blocks above `maxBlocks` are not recorded. */
  constructor(
    private readonly tree: BlockTree,
    private readonly instance: Instance,
    maxBlocks = 500_000,
  ) {
    this.#holder = tree.holderOf(instance);
    this.#maxBlocks = maxBlocks;
  }

  get size(): number {
    return this.#blocks.size;
  }

  *stored({ hashes, parent, tokens, blockSize, lookahead, group }: StoredBlocks): Steps {
    const isWhole = tokens.length === hashes.length * blockSize;
    if (!this.#learn(group, blockSize, isWhole)) return;
    const count = parent === undefined && (yield* this.#has(hashes, group.index)) ? 0 : 1;
    let before = parent;
    for (let from = 0; from < hashes.length; from += STEP_BLOCKS) {
      if (from > 0) yield;
      const piece = hashes.slice(from, from + STEP_BLOCKS);
      const numbers: number[] = [];
      for (const hash of piece) {
        const number = this.#add(hash);
        if (number === undefined) break;
        this.#blocks.addCopies(number, group.index, count);
        numbers.push(number);
      }
      if (isWhole && numbers.length > 0) {
        const hashOf = (at: number) =>
          tokensHash(tokens, at * blockSize, (at + 1) * blockSize, lookahead?.[at]);
        this.#lookahead = lookahead?.[0]?.length ?? 0;
        const run = { hashes: piece, tokens: numbers.map((_, at) => hashOf(from + at)) };
        if (before !== undefined) this.#placeAfter(before, run, numbers);
        else {
          const geometry = this.tree.open(this.#geometry(blockSize), this.#holder);
          if (geometry !== undefined) this.#place(geometry.root, run, numbers);
        }
      }
      if (numbers.length < piece.length) return;
      before = piece.at(-1);
    }
  }

  *removed({ hashes, group }: RemovedBlocks): Steps {
    for (const [at, hash] of hashes.entries()) {
      if (at > 0 && at % STEP_BLOCKS === 0) yield;
      const number = this.#blocks.find(hash);
      if (number === 0) continue;
      this.#blocks.addCopies(number, group, -1);
      if (this.#blocks.hasCopies(number)) continue;
      const block = this.#blocks.block(number);
      this.#blocks.remove(number);
      if (block !== 0) this.tree.drop(block, this.#holder);
    }
  }

  /** Look-ups find nothing at once. The steps free the memory. */
  cleared(): Steps {
    const dropping = this.#dropping(this.#blocks, this.#holder);
    this.#holder = this.tree.renewed(this.instance);
    this.#blocks = new BlockHashes();
    this.#groups.clear();
    this.#waiting.clear();
    this.#waitingBlocks = 0;
    this.refused = 0;
    return dropping;
  }

  *#dropping(blocks: BlockHashes, holder: number): Steps {
    let dropped = 0;
    for (const number of blocks.placed()) {
      this.tree.drop(blocks.block(number), holder);
      dropped += 1;
      if (dropped % STEP_BLOCKS === 0) yield;
    }
    this.tree.released(holder);
  }

  /**
   * How many tokens of a prompt vLLM takes from its cache: the longest prefix for which each KV
   * cache group has the blocks it needs. The last token is always computed.
   */
  matchedTokens(tokens: ArrayLike<number>): number {
    const groups = [...this.#groups.values()];
    const [first] = groups;
    if (first === undefined) return 0;
    if (groups.length === 1 && first.needs === "all") {
      const path = this.#path(tokens, first.blockSize);
      const missing = path.findIndex((block) => !this.tree.has(block, this.#holder));
      return (missing === -1 ? path.length : missing) * first.blockSize;
    }
    const sizes = [...new Set(groups.map(({ blockSize }) => blockSize))];
    const numbersOf = (size: number) =>
      this.#path(tokens, size).map((block) => this.#blocks.numberOf(block));
    const paths = new Map(sizes.map((size) => [size, numbersOf(size)]));
    const has = ({ index, blockSize }: Group, at: number) =>
      this.#blocks.copies(paths.get(blockSize)?.[at] ?? 0, index) > 0;
    const step = Math.max(...sizes);
    let matched = Number.POSITIVE_INFINITY;
    for (const group of groups) {
      let length = group.needs === "all" ? 0 : (paths.get(group.blockSize)?.length ?? 0);
      if (group.needs === "all") while (has(group, length)) length += 1;
      matched = Math.min(matched, length * group.blockSize);
    }
    const hasWindow = (group: Group, end: number) => {
      if (group.needs === "all") return true;
      let at = Math.max(0, Math.floor((end - group.needs) / group.blockSize));
      while (at < end / group.blockSize && has(group, at)) at += 1;
      return at >= end / group.blockSize;
    };
    let end = matched - (matched % step);
    while (end > 0 && !groups.every((group) => hasWindow(group, end))) end -= step;
    return end;
  }

  #path(tokens: ArrayLike<number>, blockSize: number): readonly number[] {
    const geometry = this.tree.geometry(this.#geometry(blockSize));
    return geometry === undefined ? [] : this.tree.path(tokens, geometry);
  }

  /** With `kv_cache_report_mode` "full", vLLM repeats blocks that a request finds in the cache. */
  *#has(hashes: readonly string[], group: number): Generator<undefined, boolean> {
    for (const [at, hash] of hashes.entries()) {
      if (at > 0 && at % STEP_BLOCKS === 0) yield;
      if (this.#blocks.copies(this.#blocks.find(hash), group) === 0) return false;
    }
    return true;
  }

  /**
   * False above the limit of groups. vLLM's partial blocks for layers with a state do not change
   * the block size.
   */
  #learn({ index, needs }: CacheGroup, blockSize: number, isWhole: boolean): boolean {
    const known = this.#groups.get(index);
    if (known === undefined && this.#groups.size >= MAX_GROUPS) return false;
    this.#groups.set(index, {
      index,
      blockSize: Math.max(blockSize, known?.blockSize ?? 0),
      // vLLM 0.33 does not tell a group's kind. A group that leaves blocks out needs at least the
      // last ones of a prefix.
      needs: needs !== "all" ? needs : isWhole ? (known?.needs ?? "all") : 1,
    });
    return true;
  }

  #add(hash: string): number | undefined {
    const known = this.#blocks.find(hash);
    if (known !== 0) return known;
    if (this.#blocks.size < this.#maxBlocks) return this.#blocks.addNotFound();
    this.refused += 1;
    return undefined;
  }

  #geometry(blockSize: number): BlockGeometry {
    return { blockSize, lookahead: this.#lookahead };
  }

  #placeAfter(parent: string, run: Run, numbers: readonly number[]): void {
    const block = this.#blocks.block(this.#blocks.find(parent));
    if (block !== 0) {
      this.#place(block, run, numbers);
      return;
    }
    if (run.hashes.includes(parent)) {
      this.contradictions += 1;
      return;
    }
    getOrAdd(this.#waiting, parent, () => []).push(run);
    this.#waitingBlocks += run.hashes.length;
    for (const oldest of this.#waiting.keys()) {
      if (this.#waitingBlocks <= MAX_WAITING) break;
      this.#takeWaiting(oldest);
    }
  }

  /** Places a run up to an evicted block, and then the runs that waited for it. */
  #place(parent: number, first: Run, itsNumbers: readonly number[]): void {
    const placing = [{ parent, run: first, numbers: itsNumbers }];
    for (let next = placing.pop(); next !== undefined; next = placing.pop()) {
      const { run, numbers } = next;
      let before = next.parent;
      for (const [at, number] of numbers.entries()) {
        before = number === 0 ? 0 : this.#placeOne(number, before, run.tokens[at] ?? 0);
        if (before === 0) break;
        if (this.#waitingBlocks === 0) continue;
        for (const waiting of this.#takeWaiting(run.hashes[at] ?? "")) {
          const found = waiting.hashes.map((hash) => this.#blocks.find(hash));
          placing.push({ parent: before, run: waiting, numbers: found });
        }
      }
    }
  }

  #takeWaiting(parent: string): readonly Run[] {
    const runs = this.#waiting.get(parent) ?? [];
    this.#waiting.delete(parent);
    for (const { hashes } of runs) this.#waitingBlocks -= hashes.length;
    return runs;
  }

  /** 0 if it contradicts an earlier event. */
  #placeOne(number: number, parent: number, tokens: number): number {
    const [known, there] = [this.#blocks.block(number), this.tree.at(parent, tokens)];
    if (known !== 0 && known === there) return known;
    if (known !== 0 || (there !== 0 && this.tree.has(there, this.#holder))) {
      this.contradictions += 1;
      return 0;
    }
    const block = there === 0 ? this.tree.add(parent, tokens) : there;
    this.tree.hold(block, this.#holder);
    this.#blocks.place(number, block);
    return block;
  }
}
