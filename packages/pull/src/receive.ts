import {
  endWith,
  type FailureType,
  type HeartbeatSender,
  inSpan,
  isPeerLost,
  type RankKey,
  ReceiveError,
  ReceivePass,
  type RemoteEngine,
  type RemoteEngines,
  rankKey,
  transferTraced,
  unreachablePeer,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { planRequest, type RequestPlan } from "@kv/plan";
import { encodeNotification, encodeRequestControl, REQUEST_CONTROL } from "@kv/protocol";
import { leaseDeadlineMs } from "./lease-deadline.js";
import type { ReceiveOrder, RemoteBlocks } from "./step-metadata.js";

/** The parts that D's receives share. */
export interface ReceiverOptions {
  readonly context: WorkerContext;
  readonly engines: RemoteEngines;
  readonly heartbeats: Pick<HeartbeatSender, "takenAtMs">;
}

/**
 * Receives one request's KV from P's blocks into D's: plan, READs, a query whether P held the blocks until the end, the receive pass, and the
 * notification that P may free the blocks.
 */
export class PullReceiver {
  readonly #context: WorkerContext;
  readonly #engines: RemoteEngines;
  readonly #heartbeats: Pick<HeartbeatSender, "takenAtMs">;
  readonly #pass: ReceivePass;

  constructor({ context, engines, heartbeats }: ReceiverOptions) {
    this.#context = context;
    this.#engines = engines;
    this.#heartbeats = heartbeats;
    this.#pass = new ReceivePass(context.caches);
  }

  /**
   * Receives a request. Settles when no transfer of it can touch memory any more. Rejects with a `ReceiveError`; P is notified then too, if
   * the handshake succeeded.
   */
  async receive(order: ReceiveOrder, signal: AbortSignal): Promise<void> {
    const reference = await this.#engines.acquire(order.remote, signal).catch((error: unknown) => {
      throw ReceiveError.from(unreachablePeer(error), "KV_HANDSHAKE_REFUSED", "handshake_failed", signal);
    });
    try {
      await this.#receiveFrom(reference.peer, order, signal);
    } finally {
      reference.release();
    }
  }

  /** Notifies ranks of P, in the background, that this rank does not need the request's blocks (any more). */
  notifyDone(engine: RemoteEngine, remote: RemoteBlocks, ranks: Iterable<RankKey>): void {
    const { log, metrics, notifications, tracer } = this.#context;
    const payload = doneNotification(engine, remote);
    const parent = remote.traceparent;
    for (const rank of ranks) {
      const agent = engine.agents.get(rank);
      if (agent === undefined) continue;
      const span = tracer?.start("kv.notify", { parent, attributes: { "kv.remote_agent": agent } });
      const sent = notifications.send(agent, payload, (error) => {
        // P frees the blocks when the lease ends.
        metrics.notificationFailed();
        span?.end(error);
        log.warn("notification_failed", {
          requestId: remote.requestId,
          remoteRank: rank,
          error: String(error),
        });
      });
      void endWith(span, sent);
    }
  }

  async #receiveFrom(engine: RemoteEngine, order: ReceiveOrder, signal: AbortSignal): Promise<void> {
    const { clock, tracer } = this.#context;
    const parent = order.remote.traceparent;
    /** Ranks of P to notify at the end. A notification that is attached to a READ removes its rank. */
    const toNotify = new Set(engine.agents.keys());
    try {
      const plan = inSpan(tracer?.start("kv.plan", { parent }), () => planReceive(engine, order, signal));
      const canAsk = engine.incarnation !== undefined;
      if (!canAsk && clock.now() >= this.#deadlineMs(order, engine)) throw this.#expired(order, engine);
      await this.#readAll(engine, plan, order, signal, { mayRide: !canAsk, toNotify });
      if (canAsk) await this.#requireLease(order, engine, signal);
      else if (clock.now() > this.#deadlineMs(order, engine)) throw this.#expired(order, engine);
      try {
        if (plan.receivePass !== undefined)
          inSpan(tracer?.start("kv.receive_pass", { parent }), () => this.#pass.apply(engine, plan));
      } catch (error) {
        throw ReceiveError.from(error, "KV_TRANSFER_FAILED", "transfer_exception", signal);
      }
    } finally {
      // After a success the blocks have arrived; after a failure they will not be read. In both cases P may free them.
      this.notifyDone(engine, order.remote, toNotify);
    }
  }

  /** Posts a READ per source, waits until all have ended and released memory, and throws the first failure. */
  async #readAll(
    engine: RemoteEngine,
    plan: RequestPlan,
    order: ReceiveOrder,
    signal: AbortSignal,
    { mayRide, toNotify }: { readonly mayRide: boolean; readonly toNotify: Set<RankKey> },
  ): Promise<void> {
    const { agent, log, metrics, tracer } = this.#context;
    const place = { tracer, parent: order.remote.traceparent };
    const notification = doneNotification(engine, order.remote);
    // One failed READ makes the others useless: they are aborted, and still waited for.
    const abort = new AbortController();
    const onAbort = () => abort.abort(signal.reason);
    signal.addEventListener("abort", onAbort);
    let failure: ReceiveError | undefined;
    const fail = (error: unknown, failureType: FailureType, rank: RankKey): void => {
      if (failure === undefined) {
        failure = ReceiveError.from(error, "KV_TRANSFER_FAILED", failureType, signal);
        if (!signal.aborted) {
          metrics.transferFailed();
          log.warn("transfer_failed", {
            requestId: order.requestId,
            engineId: order.remote.engineId,
            remoteRank: rank,
            error: failure.error.message,
          });
          if (isPeerLost(failure.error)) this.#engines.table.drop(engine, failure.error.message);
        }
      }
      abort.abort(failure.error);
    };
    const ended: Promise<void>[] = [];
    for (const { sourceIndex, listIndex, remoteRank, remotePpRank, descriptors } of plan.reads) {
      if (failure !== undefined) break;
      const rank = rankKey({ ppRank: remotePpRank, tpRank: remoteRank });
      const lists = engine.sources[sourceIndex]?.lists[listIndex];
      if (lists === undefined) {
        const why = `the plan reads from list ${listIndex} of source ${sourceIndex}, which was not prepared`;
        fail(new KvError("KV_INTERNAL", `request ${order.requestId}: ${why}`), "transfer_setup_failed", rank);
        break;
      }
      // NIXL delivers a notification only after its own request. With several READs from one rank, P is notified after all of them.
      const rides = mayRide && plan.reads.filter((other) => other.sourceIndex === sourceIndex).length === 1;
      try {
        const read = { operation: "READ", local: lists.local, remote: lists.remote, ...descriptors } as const;
        const transfer = transferTraced(
          agent,
          { ...read, signal: abort.signal, notification: rides ? notification : undefined },
          place,
        );
        const done = transfer.done.then(
          (result) => {
            if (rides) toNotify.delete(rank);
            metrics.transferred(result);
          },
          (error: unknown) => fail(error, "transfer_failed", rank),
        );
        ended.push(done, transfer.released);
      } catch (error) {
        fail(error, "transfer_setup_failed", rank);
      }
    }
    await Promise.all(ended);
    signal.removeEventListener("abort", onAbort);
    if (failure !== undefined) throw failure;
  }

  /** Checks that P held the blocks until the READs had ended. */
  async #requireLease(order: ReceiveOrder, engine: RemoteEngine, signal: AbortSignal): Promise<void> {
    const { engineId, requestId } = order.remote;
    const { held, incarnation } = await this.#engines
      .queryLease(order.remote, signal)
      .catch((error: unknown) => {
        this.#context.log.warn("lease_query_failed", { requestId, engineId, error: String(error) });
        const told = unreachablePeer(error);
        throw ReceiveError.from(told, "KV_SIDE_CHANNEL_UNREACHABLE", "lease_query_failed", signal);
      });
    if (held && incarnation === engine.incarnation) return;
    const error = new KvError(
      "KV_LEASE_EXPIRED",
      `engine ${engineId} did not keep the blocks of request ${requestId} until they were read: the bytes that were read are not used`,
      {
        hint: "the lease ended, another reader was done with the request, or the prefill worker was restarted; send the prompt to it again",
        details: { engineId, requestId, incarnation: engine.incarnation, answeredBy: incarnation },
      },
    );
    throw ReceiveError.from(error, "KV_LEASE_EXPIRED", "lease_expired", signal);
  }

  #deadlineMs(order: ReceiveOrder, engine: RemoteEngine): number {
    const { leaseMs, extensionMs, leaseMarginMs } = this.#context.settings;
    return leaseDeadlineMs({
      expirySeconds: order.remote.expirySeconds,
      clock: engine.clock,
      seenAtMs: order.seenAtMs,
      leaseMs,
      extensionMs,
      marginMs: leaseMarginMs,
      heartbeatsAtMs: this.#heartbeats.takenAtMs(order.remote),
    });
  }

  #expired(order: ReceiveOrder, engine: RemoteEngine): ReceiveError {
    const { engineId, requestId } = order.remote;
    const lateMs = this.#context.clock.now() - this.#deadlineMs(order, engine);
    const error = new KvError(
      "KV_LEASE_EXPIRED",
      `engine ${engineId} was guaranteed to hold the blocks of request ${requestId} only until ${Math.ceil(lateMs)} ms ago: its READ is not used`,
      {
        hint: "raise kv_lease_duration on both sides, or give decode workers more blocks",
        details: { lateMs },
      },
    );
    return new ReceiveError(error, "lease_expired");
  }
}

/** `"{id}:{n}"`, or the same with the request's capability: n is the number of D's ranks that P's rank waits for. */
function doneNotification({ plan, features }: RemoteEngine, { requestId, lease }: RemoteBlocks): Uint8Array {
  const readers = plan.localConsumers;
  const { capability } = lease ?? {};
  return capability !== undefined && features.has(REQUEST_CONTROL)
    ? encodeRequestControl({ kind: "done", requestId, readers, capability })
    : encodeNotification({ kind: "done", requestId, readers });
}

function planReceive(engine: RemoteEngine, order: ReceiveOrder, signal: AbortSignal): RequestPlan {
  try {
    signal.throwIfAborted();
    const blocks = {
      localBlockIds: order.localBlockIds,
      remoteBlockIds: order.remote.blockIds,
      localComputedBlocks: order.localComputedBlocks,
      ...(order.remote.numTokens === undefined ? {} : { numTokens: order.remote.numTokens }),
    };
    return planRequest(engine.plan, engine.joint?.blocks(blocks) ?? blocks);
  } catch (error) {
    throw ReceiveError.from(error, "KV_TRANSFER_INVALID", "transfer_setup_failed", signal);
  }
}
