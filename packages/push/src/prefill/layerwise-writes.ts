import type { LeaseOrder, SendableRequest } from "@kv/connector";
import { type BlockIds, KvError } from "@kv/interface";
import type { Offer } from "../control.js";
import type { Produced } from "./registration-matcher.js";
import type { PeerQueues } from "./queues.js";
import type { WritePart } from "./write-blocks.js";
import type { WriteLink } from "./consumer-link.js";
import type { WriteRuns } from "./write-dispatch.js";

/**
 * Layer-wise push: what is known of a request goes to the offer that waits for it while later layers are being computed. Nothing of it is a
 * promise: no consumer is told, and what failed or went to a request that got another prompt is written again when the request
 * has finished. The WRITE that ends it waits for all that was written ahead, and carries the word.
 */
export interface WritesAhead {
  /** Regions of the request are computed; these offers wait for it. */
  computed(produced: Produced, regions: readonly string[], offers: Iterable<readonly [string, Offer]>): void;
  /** Regions that the offer has of this very request; resolves when no WRITE ahead touches memory. An abort of `signal` cuts them short. */
  settle(key: string, order: LeaseOrder, signal: AbortSignal): Promise<ReadonlySet<string>>;
  /** The offer is over. Resolves when nothing is under way for it. */
  giveUp(key: string, reason: KvError): Promise<void>;
  /** The request is over: undefined when nothing reads its blocks, else when that is so. */
  release(produced: Produced): Promise<void> | undefined;
  /** Offers that were written to ahead. */
  readonly size: number;
  close(): void;
}

export interface WritesAheadOptions {
  readonly queues: PeerQueues;
  readonly runs: WriteRuns;
  /** Names of all regions: the last to be computed is left to the WRITE that ends the request. */
  readonly regions: readonly string[];
  readonly write: WriteBlocks;
}

/** Writes a part of what an offer is for, to some of its ranks. */
export type WriteBlocks = (
  link: WriteLink,
  ranks: readonly number[],
  pair: { order: WritableOrder; offer: Offer },
  signal: AbortSignal,
  part: WritePart,
) => Promise<void>;

/** What can be written of: which blocks, and of how many tokens. */
export type WritableOrder = SendableRequest & Pick<LeaseOrder, "promptBlockIds" | "numTokens">;

interface Ahead {
  readonly produced: Produced;
  readonly promptBlockIds: BlockIds;
  readonly asked: Set<string>;
  readonly written: Set<string>;
  readonly controller: AbortController;
  readonly running: Set<Promise<void>>;
}

const NOTHING: ReadonlySet<string> = new Set();

export function createWritesAhead(options: WritesAheadOptions): WritesAhead {
  const { queues, runs } = options;
  const entries = new Map<string, Ahead>();
  const ready = new Map<Produced, Set<string>>();

  function write(key: string, offer: Offer, produced: Produced, done: ReadonlySet<string>): void {
    const { own } = offer;
    const { promptBlockIds, numTokens } = produced.order;
    if (own === undefined || promptBlockIds === undefined || numTokens === undefined) return;
    const entry = entries.get(key) ?? {
      produced,
      promptBlockIds,
      asked: new Set<string>(),
      written: new Set<string>(),
      controller: new AbortController(),
      running: new Set<Promise<void>>(),
    };
    // Another request of the same name was quicker: the one that finishes will be written whole.
    if (entry.produced !== produced || entry.controller.signal.aborted) return;
    entries.set(key, entry);
    const regions = new Set([...done].filter((region) => !entry.asked.has(region)));
    for (const region of regions) entry.asked.add(region);
    if (regions.size === 0) return;
    const order = { ...produced.order, promptBlockIds, numTokens };
    const { controller } = entry;
    const work = new Promise<void>((resolve) => {
      queues.add(offer.engineId, async () => {
        const part: WritePart = { has: (region) => regions.has(region), last: false };
        const error = await runs.run(offer, produced.requestId, controller, (link) =>
          options.write(link, [own.rank], { order, offer }, controller.signal, part),
        );
        if (error === undefined) for (const region of regions) entry.written.add(region);
        resolve();
      });
    });
    entry.running.add(work);
    void work.then(() => entry.running.delete(work));
  }

  async function quiet({ running }: Ahead): Promise<void> {
    while (running.size > 0) await Promise.all(running);
  }

  return {
    computed(produced, regions, offers) {
      const done = ready.get(produced) ?? new Set<string>();
      ready.set(produced, done);
      for (const region of regions) done.add(region);
      if (options.regions.every((region) => done.has(region))) return;
      for (const [key, offer] of offers) write(key, offer, produced, done);
    },
    async settle(key, order, signal) {
      const entry = entries.get(key);
      if (entry === undefined) return NOTHING;
      const onAbort = () => entry.controller.abort(signal.reason);
      if (signal.aborted) onAbort();
      else signal.addEventListener("abort", onAbort);
      await quiet(entry);
      signal.removeEventListener("abort", onAbort);
      entries.delete(key);
      const { wireId, generation } = entry.produced;
      const same =
        wireId === order.wireId &&
        generation === order.generation &&
        sameBlocks(entry.promptBlockIds, order.promptBlockIds);
      return same ? entry.written : NOTHING;
    },
    async giveUp(key, reason) {
      const entry = entries.get(key);
      if (entry === undefined) return;
      entry.controller.abort(reason);
      await quiet(entry);
      if (entries.get(key) === entry) entries.delete(key);
    },
    release(produced) {
      ready.delete(produced);
      const mine = [...entries].filter(([, entry]) => entry.produced === produced);
      if (mine.length === 0) return undefined;
      const reason = new KvError("KV_REQUEST_ABORTED", `request ${produced.requestId} is over`);
      return Promise.all(
        mine.map(async ([key, entry]) => {
          entry.controller.abort(reason);
          await quiet(entry);
          if (entries.get(key) === entry) entries.delete(key);
        }),
      ).then(() => {});
    },
    get size() {
      return entries.size;
    },
    close() {
      const reason = new KvError("KV_AGENT_CLOSED", "the worker was closed");
      for (const { controller } of entries.values()) controller.abort(reason);
      ready.clear();
    },
  };
}

function sameBlocks(a: BlockIds, b: BlockIds): boolean {
  return a.length === b.length && a.every((ids, group) => ids.join() === b[group]?.join());
}
