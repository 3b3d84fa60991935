import {
  HeartbeatSender,
  idleWithinGrace,
  type PendingReceive,
  PendingReceives,
  planPrefillEngine,
  ReceiveError,
  type RemoteEngine,
  RemoteEngines,
  type RemoteRequest,
  rankKey,
  TaskTracker,
  traced,
  transferAll,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { planRequest, type RequestPlan } from "@kv/plan";
import { encodeNotification, encodeRequestControl, REQUEST_CONTROL } from "@kv/protocol";
import { blocksNotHeld, leaseEnded, promptMismatch } from "./receive-errors.js";
import type { PullStepMetadata, ReceiveOrder } from "./step-metadata.js";

/** Blocks at a P, and the engine that they are read from. */
interface Held {
  readonly remote: RemoteRequest;
  readonly engine: RemoteEngine;
  release(): void;
}

/**
 * D's half of a worker. Every order of the scheduler becomes a separate receive, which waits for
 * the handshake with its P without delaying the step: plan, READs, a query whether P held the
 * blocks until the end and computed the same prompt, and the receive pass. Its outcome is in the
 * worker's output at its deadline at the latest. P is notified later, when the scheduler says that
 * no request here reads its blocks: while a READ runs, another request may begin to read them, so
 * the notification never rides on one.
 */
export class DecodeWorker implements WorkerHalf<PullStepMetadata> {
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #heartbeats: HeartbeatSender;
  readonly #receives: PendingReceives<ReceiveOrder>;
  /** The engines that blocks were read from. They stay open until the blocks are released. */
  readonly #held = new Map<string, Held>();
  readonly #unreachable = new Set<string>();
  readonly #running = new TaskTracker();
  readonly #sending = new TaskTracker();

  constructor(context: WorkerContext) {
    const { settings } = context;
    this.#context = context;
    this.engines = new RemoteEngines(context, {
      failureType: "handshake_setup_failed",
      role: "prefill",
      plan: (_, answer) => planPrefillEngine(context, answer, { joinsGroups: true }),
    });
    this.#heartbeats = new HeartbeatSender({
      ...context,
      intervalMs: settings.heartbeatIntervalMs,
      engines: this.engines,
      tasks: this.#sending,
    });
    this.#receives = new PendingReceives<ReceiveOrder>(
      { ...context, tasks: this.#running, timeoutMs: settings.requestTimeoutMs },
      {
        run: (receive) => this.#receive(receive),
        ended: (receive, error) => this.#ended(receive, error),
      },
    );
  }

  /** Starts and aborts receives, releases blocks, and extends leases, as the scheduler orders. */
  step({ receives, releases, aborts, heartbeats, schedulerClockMs }: PullStepMetadata): void {
    const nowMs = this.#context.clock.now();
    for (const order of receives) {
      // The scheduler's clock may have another origin than this worker's.
      const seenAtMs = nowMs - (schedulerClockMs - order.seenAtMs);
      this.#receives.start({ ...order, seenAtMs });
    }
    for (const remote of releases) this.#release(remote);
    for (const requestId of aborts) {
      this.#receives.abort(
        requestId,
        new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`),
      );
    }
    this.#heartbeats.change(heartbeats);
  }

  /** Numbers of receives, of notifications that are being sent, and of leases that are extended. */
  outstanding(): {
    readonly receives: number;
    readonly notifications: number;
    readonly heartbeats: number;
  } {
    return {
      receives: this.#receives.size,
      notifications: this.#sending.size + this.#context.notifications.size,
      heartbeats: this.#heartbeats.size,
    };
  }

  /**
   * Fails every receive, and waits until no transfer can touch memory any more; at most
   * `CLOSE_GRACE_MS`.
   */
  async close(reason = new KvError("KV_AGENT_CLOSED", "the worker was closed")): Promise<void> {
    const { clock, log, notifications } = this.#context;
    this.#heartbeats.close();
    for (const receive of this.#receives.values()) receive.fail(reason);
    if (this.#running.size === 0) this.#releaseAll();
    else void this.#running.idle().then(() => this.#releaseAll());
    if (await idleWithinGrace(clock, [this.#running, this.#sending, notifications])) return;
    log.warn("close-did-not-wait", {
      receives: this.#running.size,
      notifications: this.#sending.size + notifications.size,
    });
  }

  /**
   * Receives a request. Settles when no transfer of it can touch memory any more.
   * @throws `ReceiveError`.
   */
  async #receive(receive: PendingReceive<ReceiveOrder>): Promise<void> {
    const { order } = receive;
    const { clock, tracer } = this.#context;
    const { engine, release } = await receive.open(this.engines, "handshake_failed");
    this.#hold({ remote: order.remote, engine, release });
    const parent = order.remote.traceparent;
    const plan = traced(tracer, "kv.plan", { parent }, () => planReceive(engine, receive));
    const canAsk = engine.incarnation !== undefined;
    if (!canAsk && clock.now() >= this.#deadlineMs(order, engine))
      throw this.#expired(order, engine);
    await this.#read(engine, plan, receive);
    if (canAsk) receive.isVerified = await this.#requireLease(engine, receive);
    else if (clock.now() > this.#deadlineMs(order, engine)) throw this.#expired(order, engine);
    await receive.pass(engine, plan);
  }

  /**
   * Posts a READ per source, waits until all have ended and released memory, and throws the first
   * failure.
   */
  async #read(
    engine: RemoteEngine,
    plan: RequestPlan,
    receive: PendingReceive<ReceiveOrder>,
  ): Promise<void> {
    const { order, signal } = receive;
    const parent = order.remote.traceparent;
    await transferAll(this.#context, { signal, parent }, async (transfers) => {
      const reads = plan.reads.map(async (read) => {
        const { sourceIndex, listIndex, remoteRank, remotePpRank, descriptors } = read;
        if (transfers.hasFailed) return;
        const failed = (error: unknown, isStarted: boolean): ReceiveError => {
          const type = isStarted ? "transfer_failed" : "transfer_setup_failed";
          const failure = receive.error(error, type);
          const rank = rankKey({ ppRank: remotePpRank, tpRank: remoteRank });
          if (!signal.aborted) this.#readFailed(engine, order, rank, failure.error);
          return failure;
        };
        const lists = engine.sources[sourceIndex]?.lists[listIndex];
        if (lists === undefined) {
          const why = `the plan reads from list ${listIndex} of source ${sourceIndex}, which was not prepared`;
          const error = new KvError("KV_INTERNAL", `request ${order.requestId}: ${why}`);
          transfers.fail(failed(error, false));
          return;
        }
        await transfers.start({ operation: "READ", ...lists, ...descriptors }, failed);
      });
      await Promise.all(reads);
    });
  }

  #readFailed(engine: RemoteEngine, order: ReceiveOrder, remoteRank: string, error: KvError): void {
    const { log, metrics } = this.#context;
    const { requestId, remote } = order;
    metrics.transferFailed();
    log.warn("transfer_failed", {
      requestId,
      engineId: remote.engineId,
      remoteRank,
      error: error.message,
    });
    this.engines.dropIfLost(engine, error);
  }

  /**
   * Checks that P held the blocks until the READs had ended. Returns whether P has compared the
   * prompts: one of an earlier version does not.
   * @throws `ReceiveError`.
   */
  async #requireLease(
    engine: RemoteEngine,
    receive: PendingReceive<ReceiveOrder>,
  ): Promise<boolean> {
    const { order, signal } = receive;
    const { engineId, requestId } = order.remote;
    const reply = await this.engines.queryLease(order.remote, signal).catch((error: unknown) => {
      this.#context.log.warn("lease_query_failed", { requestId, engineId, error: String(error) });
      throw receive.error(error, "lease_query_failed", "KV_SIDE_CHANNEL_UNREACHABLE");
    });
    if (reply.prompt === "differs")
      throw new ReceiveError(promptMismatch(order), "prompt_mismatch");
    if (reply.held && reply.incarnation === engine.incarnation) return reply.prompt === "same";
    const error = blocksNotHeld(order.remote, engine.incarnation, reply.incarnation);
    throw receive.error(error, "lease_expired");
  }

  #deadlineMs(order: ReceiveOrder, engine: RemoteEngine): number {
    const { settings } = this.#context;
    return leaseDeadlineMs(order, engine, settings, this.#heartbeats.takenAtMs(order.remote));
  }

  #expired(order: ReceiveOrder, engine: RemoteEngine): ReceiveError {
    const lateMs = this.#context.clock.now() - this.#deadlineMs(order, engine);
    return new ReceiveError(leaseEnded(order.remote, lateMs), "lease_expired");
  }

  #ended(
    { order, signal, isAborted }: PendingReceive<ReceiveOrder>,
    error: ReceiveError | undefined,
  ): void {
    // P refuses handshakes or does not answer: it is not asked once more, only to be notified. Its
    // blocks are free at the end of their lease.
    const key = keyOf(order.remote);
    if (error?.failureType === "handshake_failed" && !signal.aborted && !this.#held.has(key))
      this.#unreachable.add(key);
    if (!isAborted && error?.failureType === "lease_expired") this.#context.metrics.leaseExpired();
  }

  #hold(held: Held): void {
    const key = keyOf(held.remote);
    this.#held.get(key)?.release();
    this.#held.set(key, held);
    this.#unreachable.delete(key);
  }

  /**
   * Notifies P's ranks in the background that nobody here reads the blocks. A P that was not read
   * from is shaken hands with first.
   */
  #release(remote: RemoteRequest): void {
    const key = keyOf(remote);
    if (this.#unreachable.delete(key)) return;
    const held = this.#held.get(key);
    if (held !== undefined) {
      this.#held.delete(key);
      this.#notifyDone(held.engine, remote);
      held.release();
      return;
    }
    const { log, metrics } = this.#context;
    this.#sending.track(
      this.engines.notify(
        remote,
        (engine) => this.#notifyDone(engine, remote),
        (error) => {
          metrics.notificationFailed();
          log.warn("notification_failed", { requestId: remote.requestId, error: String(error) });
        },
      ),
    );
  }

  #releaseAll(): void {
    for (const { remote } of [...this.#held.values()]) this.#release(remote);
    this.#unreachable.clear();
  }

  #notifyDone(engine: RemoteEngine, remote: RemoteRequest): void {
    const { log, metrics, notifications, tracer } = this.#context;
    const payload = doneNotification(engine, remote);
    for (const [remoteRank, agent] of engine.agents) {
      const attributes = { "kv.remote_agent": agent };
      void traced(tracer, "kv.notify", { parent: remote.traceparent, attributes }, (span) =>
        notifications.send(agent, payload, (error) => {
          // P frees the blocks when the lease ends.
          metrics.notificationFailed();
          span?.end(error);
          log.warn("notification_failed", {
            requestId: remote.requestId,
            remoteRank,
            error: String(error),
          });
        }),
      );
    }
  }
}

function planReceive(engine: RemoteEngine, receive: PendingReceive<ReceiveOrder>): RequestPlan {
  const { order, signal } = receive;
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
    throw receive.error(error, "transfer_setup_failed", "KV_TRANSFER_INVALID");
  }
}

/**
 * Returns until when a P that answers no lease queries is assumed to hold a request's blocks, in ms
 * on the local clock. A one-sided READ succeeds even when another request owns the blocks
 * meanwhile, so a READ that ends later is not used. A P of `@kv` is queried after the READ instead
 * (`queryLease`). Only a query detects blocks that were freed early because a retry gave the same
 * parameters to another reader. `heartbeatsAtMs`: when the transport got heartbeats that name the
 * request, ascending.
 */
export function leaseDeadlineMs(
  {
    remote: { expirySeconds },
    seenAtMs,
  }: {
    readonly remote: Pick<ReceiveOrder["remote"], "expirySeconds">;
    readonly seenAtMs: number;
  },
  { clock }: { readonly clock: Pick<RemoteEngine["clock"], "earliestLocalMs"> },
  settings: Pick<WorkerContext["settings"], "extensionMs" | "leaseMarginMs" | "leaseMs">,
  heartbeatsAtMs: readonly number[],
): number {
  const { extensionMs, leaseMarginMs, leaseMs } = settings;
  // A vLLM 0.33 P announces no expiry. Its lease counts from the end of the prefill, just before D
  // saw the request. It is assumed to be as long as D's.
  const grantedMs =
    expirySeconds === undefined ? seenAtMs + leaseMs : clock.earliestLocalMs(expirySeconds);
  let deadlineMs = grantedMs - leaseMarginMs;
  for (const atMs of heartbeatsAtMs) {
    // A heartbeat after the deadline may have found no lease to extend.
    if (atMs > deadlineMs) break;
    deadlineMs = Math.max(deadlineMs, atMs + extensionMs - leaseMarginMs);
  }
  return deadlineMs;
}

/**
 * `"{id}:{n}"`, or the same with the request's capability: n is the number of D's ranks that P's
 * rank waits for.
 */
function doneNotification(
  { plan, features }: RemoteEngine,
  { requestId, lease }: RemoteRequest,
): Uint8Array {
  const readers = plan.localConsumers;
  const { capability } = lease ?? {};
  return capability !== undefined && features.has(REQUEST_CONTROL)
    ? encodeRequestControl({ kind: "done", requestId, readers, capability })
    : encodeNotification({ kind: "done", requestId, readers });
}

function keyOf({ engineId, requestId, lease }: RemoteRequest): string {
  return JSON.stringify([engineId, requestId, lease?.capability]);
}
