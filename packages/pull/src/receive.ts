import {
  receiveBroken as broken,
  type FailureType,
  type PeerHold,
  type RankKey,
  ReceiveBroken,
  type RemoteLink,
  rankKey,
} from "@kv/connector";
import { type Agent, type Clock, KvError, type TransferResult } from "@kv/interface";
import { planRequest, type RequestPlan } from "@kv/plan";
import type { Readers } from "./completion-notifier.js";
import type { ReceiveOrder } from "./step-metadata.js";

/**
 * One request's KV, from the peer's blocks into this rank's: plan, READs, the answer to "were they still yours", the receive
 * pass. It settles only when no transfer of it can touch memory any more.
 */
export interface ReceiveOptions {
  readonly agent: Agent;
  readonly clock: Clock;
  readonly readers: Readers;
  /** Opens the peer if need be, and makes sure that it is the process that the order means. */
  link(order: ReceiveOrder, signal: AbortSignal): Promise<PeerHold<RemoteLink>>;
  /** The peer, as it is known here, is not there any more. */
  lost(link: RemoteLink, reason: string): void;
  /** Whether the peer kept the blocks until now; resolves or throws `KV_LEASE_EXPIRED`, `KV_GENERATION_STALE`. */
  verify?(order: ReceiveOrder, link: RemoteLink, signal: AbortSignal): Promise<void>;
  /** Until when a peer that cannot be asked is taken to keep them. */
  keptUntilMs(order: ReceiveOrder, link: RemoteLink): number;
  transferred(result: TransferResult): void;
  transferFailed(error: KvError, order: ReceiveOrder, rank: RankKey): void;
  /** The plan's receive pass, and what a staging platform copies. */
  settle(order: ReceiveOrder, link: RemoteLink, plan: RequestPlan): Promise<void>;
}

/** Transfers that end so say that the peer is gone, or that what is known of it is out of date. */
const PEER_LOST = [
  "KV_PEER_DISCONNECTED",
  "KV_AGENT_UNKNOWN_REMOTE",
  "KV_TRANSFER_FAILED",
  "KV_TRANSFER_TIMEOUT",
];

export async function receive(
  order: ReceiveOrder,
  signal: AbortSignal,
  options: ReceiveOptions,
): Promise<void> {
  const hold = await options.link(order, signal).catch((error: unknown) => {
    throw broken(error, "KV_HANDSHAKE_REFUSED", "handshake_failed", signal);
  });
  try {
    await receiveFrom(hold.peer, order, signal, options);
  } finally {
    hold.release();
  }
}

async function receiveFrom(
  link: RemoteLink,
  order: ReceiveOrder,
  signal: AbortSignal,
  options: ReceiveOptions,
): Promise<void> {
  const { clock, readers } = options;
  // Ranks that still have to be told; a rider that was delivered takes its rank out.
  const untold = new Set(link.agents.keys());
  try {
    const plan = planned(link, order, signal);
    const verify = link.incarnation === undefined ? undefined : options.verify;
    const keptUntilMs = () => options.keptUntilMs(order, link);
    if (verify === undefined && clock.now() >= keptUntilMs())
      throw expired(order, clock.now() - keptUntilMs());
    await read(link, plan, order, signal, options, { riders: verify === undefined, untold });
    if (verify !== undefined) {
      await verify(order, link, signal).catch((error: unknown) => {
        throw broken(error, "KV_LEASE_EXPIRED", "lease_expired", signal);
      });
    } else if (clock.now() > keptUntilMs()) throw expired(order, clock.now() - keptUntilMs());
    await options.settle(order, link, plan).catch((error: unknown) => {
      throw broken(error, "KV_TRANSFER_FAILED", "transfer_exception", signal);
    });
  } finally {
    // On success because the blocks are here, on failure because they will not be read: either way the peer may free them.
    readers.tell(link, order.remote.requestId, untold);
  }
}

function planned(link: RemoteLink, order: ReceiveOrder, signal: AbortSignal): RequestPlan {
  try {
    signal.throwIfAborted();
    const blocks = {
      localBlockIds: order.localBlockIds,
      remoteBlockIds: order.remote.blockIds,
      localComputedBlocks: order.localComputedBlocks,
      ...(order.remote.numTokens === undefined ? {} : { numTokens: order.remote.numTokens }),
    };
    return planRequest(link.plan, link.joint?.blocks(blocks) ?? blocks);
  } catch (error) {
    throw broken(error, "KV_TRANSFER_INVALID", "transfer_setup_failed", signal);
  }
}

/** Posts every READ, waits until all have ended and let go of memory, and throws the first failure. */
async function read(
  link: RemoteLink,
  plan: RequestPlan,
  order: ReceiveOrder,
  signal: AbortSignal,
  options: ReceiveOptions,
  { riders, untold }: { riders: boolean; untold: Set<RankKey> },
): Promise<void> {
  const notification = options.readers.notification(link, order.remote.requestId);
  // One failed READ makes the others useless: they are given up, and waited for all the same.
  const giveUp = new AbortController();
  const onAbort = () => giveUp.abort(signal.reason);
  signal.addEventListener("abort", onAbort);
  let failure: ReceiveBroken | undefined;
  function failed(error: unknown, failureType: FailureType, rank: RankKey): void {
    if (failure === undefined) {
      failure = broken(error, "KV_TRANSFER_FAILED", failureType, signal);
      if (!signal.aborted) {
        options.transferFailed(failure.error, order, rank);
        if (PEER_LOST.includes(failure.error.code)) options.lost(link, failure.error.message);
      }
    }
    giveUp.abort(failure.error);
  }
  const ended: Promise<void>[] = [];
  for (const { sourceIndex, listIndex, remoteRank, remotePpRank, descriptors } of plan.reads) {
    const source = link.sources[sourceIndex]?.lists[listIndex];
    if (source === undefined || failure !== undefined) break;
    const rank = rankKey({ ppRank: remotePpRank, tpRank: remoteRank });
    // Of several transfers from one rank none may say that all is read: it is told afterwards, as the untold are.
    const rides = riders && plan.reads.filter((other) => other.sourceIndex === sourceIndex).length === 1;
    try {
      const transfer = options.agent.transfer({
        operation: "READ",
        local: source.local,
        remote: source.remote,
        ...descriptors,
        signal: giveUp.signal,
        ...(rides ? { notification } : {}),
      });
      const done = transfer.done.then(
        (result) => {
          if (rides) untold.delete(rank);
          options.transferred(result);
        },
        (error: unknown) => failed(error, "transfer_failed", rank),
      );
      ended.push(done, transfer.released);
    } catch (error) {
      failed(error, "transfer_setup_failed", rank);
    }
  }
  await Promise.all(ended);
  signal.removeEventListener("abort", onAbort);
  if (failure !== undefined) throw failure;
}

function expired(order: ReceiveOrder, lateMs: number): ReceiveBroken {
  const { engineId, requestId } = order.remote;
  const error = new KvError(
    "KV_LEASE_EXPIRED",
    `engine ${engineId} was certain to keep the blocks of request ${requestId} only until ${Math.ceil(lateMs)} ms ago: its READ is not used`,
    { hint: "raise kv_lease_duration on both sides, or give decode workers more room", details: { lateMs } },
  );
  return new ReceiveBroken(error, "lease_expired");
}
