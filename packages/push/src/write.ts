import { encodeNotification, type LeaseOrder, type Messages } from "@kv/connector";
import { type Agent, KvError, type TransferResult } from "@kv/interface";
import { planRequest, type RequestRead } from "@kv/plan";
import type { Offer } from "./control.js";
import type { WriteLink, WriteTarget } from "./write-link.js";

export interface WriteOptions {
  readonly agent: Agent;
  readonly messages: Pick<Messages, "send">;
  /** The `n` of `"{id}:{n}"`. */
  readonly tpRank: number;
  readonly tpSize: number;
  transferred(result: TransferResult): void;
  notificationFailed(error: unknown, target: WriteTarget): void;
}

/**
 * A request's blocks into those that a consumer offers, for these of its ranks. Each rank hears `"{its id}:{our TP size}"` after the
 * last byte of its share. Settles only when no transfer of it can touch memory any more; throws the first failure.
 */
export async function writeBlocks(
  link: WriteLink,
  ranks: readonly number[],
  { order, offer }: { order: LeaseOrder; offer: Offer },
  signal: AbortSignal,
  options: WriteOptions,
): Promise<void> {
  const notification = encodeNotification({
    kind: "done",
    requestId: offer.wireId,
    readers: options.tpSize,
  });
  const targets = ranks.map((rank) => targetOf(link, rank));
  // All are planned before a byte is written: what cannot be planned for one rank is refused for all.
  const writes = targets.map((target) => plannedWrite(target, order, offer, options.tpRank));
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
  const ended: Promise<unknown>[] = [];
  for (const [index, target] of targets.entries()) {
    const write = writes[index];
    if (failed) break;
    if (write === undefined || target.lists === undefined) {
      const sent = options.messages.send(target.agent, notification, (error) => {
        options.notificationFailed(error, target);
        fail(error);
      });
      ended.push(sent);
      continue;
    }
    try {
      const transfer = options.agent.transfer({
        operation: "WRITE",
        // The consumer's plan reads from us: what is local there is remote here.
        local: target.lists.ours,
        localIds: write.remoteIds,
        remote: target.lists.theirs,
        remoteIds: write.localIds,
        notification,
        signal: giveUp.signal,
      });
      ended.push(transfer.done.then(options.transferred, fail), transfer.released);
    } catch (error) {
      fail(error);
    }
  }
  await Promise.all(ended);
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

/** Undefined where this rank has nothing to write to that one. */
function plannedWrite(
  { plan }: WriteTarget,
  order: LeaseOrder,
  { own, blockIds }: Offer,
  tpRank: number,
): RequestRead | undefined {
  const { reads } = planRequest(plan, {
    localBlockIds: blockIds,
    remoteBlockIds: order.promptBlockIds,
    numTokens: own?.numTokens ?? order.numTokens,
    ...(own === undefined ? {} : { localComputedBlocks: own.computedBlocks }),
  });
  return reads.find(({ remoteRank }) => remoteRank === tpRank);
}
