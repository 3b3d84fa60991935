import {
  type EngineReference,
  endWith,
  type FailureType,
  HeartbeatSender,
  idleWithinGrace,
  inSpan,
  isPeerLost,
  type PendingReceive,
  PendingReceives,
  planPrefillEngine,
  type RankKey,
  ReceiveError,
  ReceivePass,
  type RemoteEngine,
  RemoteEngines,
  type RemoteRequest,
  rankKey,
  TaskTracker,
  transferAll,
  unreachablePeer,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { planRequest, type RequestPlan } from "@kv/plan";
import { encodeNotification, encodeRequestControl, REQUEST_CONTROL } from "@kv/protocol";
import { leaseDeadlineMs } from "./lease-deadline.js";
import { blocksNotHeld, leaseEnded, promptMismatch } from "./receive-errors.js";
import type { PullStepMetadata, ReceiveOrder } from "./step-metadata.js";

/** Blocks at a P, and the engine that they are read from. */
interface Held {
  readonly remote: RemoteRequest;
  readonly reference: EngineReference<RemoteEngine>;
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
  /** The P's that this rank reads from. */
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #heartbeats: HeartbeatSender;
  readonly #receivePass: ReceivePass;
  readonly #receives: PendingReceives<ReceiveOrder>;
  /** The engines that blocks were read from. They stay open until the blocks are released. */
  readonly #held = new Map<string, Held>();
  /** Blocks at P's that did not complete the handshake. */
  readonly #unreachable = new Set<string>();
  /** Running receives. */
  readonly #running = new TaskTracker();
  /** Notifications and heartbeats that are being sent. */
  readonly #sending = new TaskTracker();

  constructor(context: WorkerContext) {
    const { settings, caches } = context;
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
    this.#receivePass = new ReceivePass(caches);
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
   * Receives a request. Settles when no transfer of it can touch memory any more. Errors:
   * `ReceiveError`.
   */
  async #receive(receive: PendingReceive<ReceiveOrder>): Promise<void> {
    const { order, signal } = receive;
    const { clock, tracer } = this.#context;
    const reference = await this.engines.acquire(order.remote, signal).catch((error: unknown) => {
      throw ReceiveError.from(
        unreachablePeer(error),
        "KV_HANDSHAKE_REFUSED",
        "handshake_failed",
        signal,
      );
    });
    this.#hold(order.remote, reference);
    const { engine } = reference;
    const parent = order.remote.traceparent;
    const plan = inSpan(tracer?.start("kv.plan", { parent }), () =>
      planReceive(engine, order, signal),
    );
    const canAsk = engine.incarnation !== undefined;
    if (!canAsk && clock.now() >= this.#deadlineMs(order, engine))
      throw this.#expired(order, engine);
    await this.#read(engine, plan, order, signal);
    if (canAsk) receive.isVerified = await this.#requireLease(order, engine, signal);
    else if (clock.now() > this.#deadlineMs(order, engine)) throw this.#expired(order, engine);
    try {
      if (plan.receivePass !== undefined)
        await endWith(
          tracer?.start("kv.receive_pass", { parent }),
          this.#receivePass.apply(engine, plan),
        );
    } catch (error) {
      throw ReceiveError.from(error, "KV_TRANSFER_FAILED", "transfer_exception", signal);
    }
  }

  /**
   * Posts a READ per source, waits until all have ended and released memory, and throws the first
   * failure.
   */
  async #read(
    engine: RemoteEngine,
    plan: RequestPlan,
    order: ReceiveOrder,
    signal: AbortSignal,
  ): Promise<void> {
    const failed = (
      error: unknown,
      failureType: FailureType,
      remoteRank: RankKey,
    ): ReceiveError => {
      const failure = ReceiveError.from(error, "KV_TRANSFER_FAILED", failureType, signal);
      if (!signal.aborted) this.#readFailed(engine, order, remoteRank, failure.error);
      return failure;
    };
    await transferAll(
      this.#context,
      { signal, parent: order.remote.traceparent },
      async (transfers) => {
        const reads = plan.reads.map(
          async ({ sourceIndex, listIndex, remoteRank, remotePpRank, descriptors }) => {
            if (transfers.hasFailed) return;
            const rank = rankKey({ ppRank: remotePpRank, tpRank: remoteRank });
            const lists = engine.sources[sourceIndex]?.lists[listIndex];
            if (lists === undefined) {
              const why = `the plan reads from list ${listIndex} of source ${sourceIndex}, which was not prepared`;
              const error = new KvError("KV_INTERNAL", `request ${order.requestId}: ${why}`);
              transfers.fail(failed(error, "transfer_setup_failed", rank));
              return;
            }
            await transfers.start(
              { operation: "READ", ...lists, ...descriptors },
              (error, isStarted) =>
                failed(error, isStarted ? "transfer_failed" : "transfer_setup_failed", rank),
            );
          },
        );
        await Promise.all(reads);
      },
    );
  }

  #readFailed(
    engine: RemoteEngine,
    order: ReceiveOrder,
    remoteRank: RankKey,
    error: KvError,
  ): void {
    const { log, metrics } = this.#context;
    const { requestId, remote } = order;
    metrics.transferFailed();
    log.warn("transfer_failed", {
      requestId,
      engineId: remote.engineId,
      remoteRank,
      error: error.message,
    });
    if (isPeerLost(error)) this.engines.drop(engine, error.message);
  }

  /**
   * Checks that P held the blocks until the READs had ended. Returns whether P has compared the
   * prompts: one of an earlier version does not. Errors: `ReceiveError`.
   */
  async #requireLease(
    order: ReceiveOrder,
    engine: RemoteEngine,
    signal: AbortSignal,
  ): Promise<boolean> {
    const { engineId, requestId } = order.remote;
    const reply = await this.engines.queryLease(order.remote, signal).catch((error: unknown) => {
      this.#context.log.warn("lease_query_failed", { requestId, engineId, error: String(error) });
      const unreachable = unreachablePeer(error);
      throw ReceiveError.from(
        unreachable,
        "KV_SIDE_CHANNEL_UNREACHABLE",
        "lease_query_failed",
        signal,
      );
    });
    if (reply.prompt === "differs")
      throw new ReceiveError(promptMismatch(order), "prompt_mismatch");
    if (reply.held && reply.incarnation === engine.incarnation) return reply.prompt === "same";
    const error = blocksNotHeld(order.remote, engine.incarnation, reply.incarnation);
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

  /** Keeps the engine open until `#release`. */
  #hold(remote: RemoteRequest, reference: EngineReference<RemoteEngine>): void {
    const key = keyOf(remote);
    this.#held.get(key)?.reference.release();
    this.#held.set(key, { remote, reference });
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
      this.#notifyDone(held.reference.engine, remote);
      held.reference.release();
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
      const span = tracer?.start("kv.notify", {
        parent: remote.traceparent,
        attributes: { "kv.remote_agent": agent },
      });
      const sent = notifications.send(agent, payload, (error) => {
        // P frees the blocks when the lease ends.
        metrics.notificationFailed();
        span?.end(error);
        log.warn("notification_failed", {
          requestId: remote.requestId,
          remoteRank,
          error: String(error),
        });
      });
      void endWith(span, sent);
    }
  }
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
