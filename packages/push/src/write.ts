import { encodeNotification, type Messages } from "@kv/connector";
import {
  type Agent,
  type DescriptorPairs,
  type DescriptorRuns,
  KvError,
  type TransferResult,
} from "@kv/interface";
import { planRequest, swapDirection } from "@kv/plan";
import type { Offer } from "./control.js";
import { createReadParts } from "./read-parts.js";
import type { WriteLink, WriteTarget } from "./write-link.js";
import type { WritableOrder } from "./writes-ahead.js";

export interface WriteOptions {
  readonly agent: Agent;
  readonly messages: Pick<Messages, "send">;
  /** The `n` of `"{id}:{n}"`. */
  readonly tpRank: number;
  readonly tpSize: number;
  transferred(result: TransferResult): void;
  notificationFailed(error: unknown, target: WriteTarget): void;
}

/** Which of a request's regions are written, and whether that is the end of it. */
export interface WritePart {
  has(region: string): boolean;
  /** The consumer's ranks are told that they have it all. */
  readonly last: boolean;
}

const WHOLE: WritePart = { has: () => true, last: true };

interface Planned {
  readonly lists: WriteTarget["lists"][number];
  readonly descriptors: DescriptorPairs | DescriptorRuns;
}

/**
 * A request's blocks into those that a consumer offers, for these of its ranks. With the last part each rank hears
 * `"{its id}:{our TP size}"` after the last byte of its share: on the WRITE where there is one, else when all of them are done, for NIXL
 * gives no order between requests. Settles only when no transfer of it can touch memory any more; throws the first failure.
 */
export async function writeBlocks(
  link: WriteLink,
  ranks: readonly number[],
  { order, offer }: { order: WritableOrder; offer: Offer },
  signal: AbortSignal,
  options: WriteOptions,
  part: WritePart = WHOLE,
): Promise<void> {
  const notification = encodeNotification({
    kind: "done",
    requestId: offer.wireId,
    readers: options.tpSize,
  });
  const targets = ranks.map((rank) => targetOf(link, rank));
  // All are planned before a byte is written: what cannot be planned for one rank is refused for all.
  const planned = targets.map((target) => plannedWrites(target, order, offer, options.tpRank, part));
  signal.throwIfAborted();
  const giveUp = new AbortController();
  const onAbort = () => giveUp.abort(signal.reason);
  signal.addEventListener("abort", onAbort);
  let failure: unknown;
  let failed = false;
  const fail = (error: unknown) => {
    if (!failed) failure = error;
    failed = true;
    giveUp.abort(error);
  };

  async function tell(target: WriteTarget): Promise<void> {
    if (failed) return;
    await options.messages.send(target.agent, notification, (error) => {
      options.notificationFailed(error, target);
      fail(error);
    });
  }

  async function writeTo(target: WriteTarget, writes: readonly Planned[]): Promise<void> {
    const rides = part.last && writes.length === 1;
    const ended: Promise<unknown>[] = [];
    for (const { lists, descriptors } of writes) {
      if (failed) break;
      try {
        const transfer = options.agent.transfer({
          operation: "WRITE",
          local: lists.ours,
          remote: lists.theirs,
          ...descriptors,
          signal: giveUp.signal,
          ...(rides ? { notification } : {}),
        });
        ended.push(transfer.done.then(options.transferred, fail), transfer.released);
      } catch (error) {
        fail(error);
      }
    }
    await Promise.all(ended);
    if (part.last && !rides) await tell(target);
  }

  await Promise.all(targets.map((target, index) => writeTo(target, planned[index] ?? [])));
  signal.removeEventListener("abort", onAbort);
  if (failed) throw signal.aborted ? signal.reason : failure;
}

function targetOf({ targets, address }: WriteLink, rank: number): WriteTarget {
  const target = targets.get(rank);
  if (target !== undefined) return target;
  throw new KvError(
    "KV_REQUEST_INVALID",
    `rank ${rank} of engine ${address.engineId} is not served by this one, which serves ${[...targets.keys()].join(", ")}`,
  );
}

const readParts = createReadParts();

/** One for each pair of memory types; none where this rank has nothing to write to that one. */
function plannedWrites(
  { plan, lists }: WriteTarget,
  order: WritableOrder,
  { own, blockIds }: Offer,
  tpRank: number,
  part: WritePart,
): Planned[] {
  const { reads } = planRequest(plan, {
    localBlockIds: blockIds,
    remoteBlockIds: order.promptBlockIds,
    numTokens: own?.numTokens ?? order.numTokens,
    ...(own === undefined ? {} : { localComputedBlocks: own.computedBlocks }),
  });
  return reads.flatMap((read) => {
    const prepared = lists[read.listIndex];
    if (read.remoteRank !== tpRank || prepared === undefined) return [];
    // The consumer's plan reads from us: what is local there is remote here.
    const descriptors = swapDirection(readParts.of(plan, read, part.has));
    const { length } = descriptors.runs ?? descriptors.localIds;
    return length === 0 ? [] : [{ lists: prepared, descriptors }];
  });
}
