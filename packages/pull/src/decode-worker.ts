import {
  HeartbeatSender,
  idleWithinGrace,
  isRefused,
  type PendingReceive,
  PendingReceives,
  planPrefillEngine,
  ReceiveError,
  type RefusedEngine,
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
import type { PullStepMetadata, ReceiveOrder } from "./step-metadata.js";

interface Held {
  readonly remote: RemoteRequest;
  readonly engine: RemoteEngine;
  release(): void;
}

/**
 * D's half of a worker. Without delaying the step, D waits for P's handshake, plans, READs, asks P
 * whether it held the blocks and has the same prompt, and runs the receive pass. The scheduler
 * orders P's notification later, as another request may begin to read the blocks meanwhile.
 */
export class DecodeWorker implements WorkerHalf<PullStepMetadata> {
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #heartbeats: HeartbeatSender;
  readonly #receives: PendingReceives<ReceiveOrder>;
  readonly #held = new Map<string, Held>();
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

  step({ receives, releases, aborts, heartbeats, schedulerClockMs }: PullStepMetadata): void {
    const nowMs = this.#context.clock.now();
    for (const order of receives) {
      // The scheduler's clock may have another origin.
      const seenAtMs = nowMs - (schedulerClockMs - order.seenAtMs);
      this.#receives.start({ ...order, seenAtMs });
    }
    for (const remote of releases) this.#release(remote);
    for (const requestId of aborts) this.#receives.abort(requestId);
    this.#heartbeats.change(heartbeats);
  }

  outstanding(): Record<"receives" | "unreleased" | "notifications" | "heartbeats", number> {
    return {
      receives: this.#receives.size,
      unreleased: this.#held.size,
      notifications: this.#sending.size + this.#context.notifications.size,
      heartbeats: this.#heartbeats.size,
    };
  }

  /** Fails every receive; waits up to `CLOSE_GRACE_MS` until no transfer touches memory. */
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
   * Settles when no transfer touches the request's memory.
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

  /** Throws the first failure after all READs, one per source. */
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
   * Checks that P held the blocks until the READs ended. True if P has compared the prompts.
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
    if (reply.prompt === "differs" || reply.prompt === "unknown")
      throw new ReceiveError(promptMismatch(order, reply.prompt), "prompt_mismatch");
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

  #ended({ isAborted }: PendingReceive<ReceiveOrder>, error: ReceiveError | undefined): void {
    if (!isAborted && error?.failureType === "lease_expired") this.#context.metrics.leaseExpired();
  }

  #hold(held: Held): void {
    const key = keyOf(held.remote);
    this.#held.get(key)?.release();
    this.#held.set(key, held);
  }

  /** Tells P's ranks that nobody here reads the blocks; first shakes hands with an unread P. */
  #release(remote: RemoteRequest): void {
    const key = keyOf(remote);
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
  }

  #notifyDone(engine: RemoteEngine | RefusedEngine, remote: RemoteRequest): void {
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
 * How long a P that answers no lease queries surely holds a request's blocks, in ms on the local
 * clock. A READ that ends later may have read another request's blocks. `heartbeatsAtMs`: when the
 * transport took heartbeats for the request, ascending.
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
  // A vLLM 0.33 P announces no expiry. Its lease begins after the prefill, just before D saw the
  // request, and is assumed to be as long as D's.
  const grantedMs =
    expirySeconds === undefined ? seenAtMs + leaseMs : clock.earliestLocalMs(expirySeconds);
  let deadlineMs = grantedMs - leaseMarginMs;
  for (const atMs of heartbeatsAtMs) {
    // A heartbeat after the deadline may find no lease.
    if (atMs > deadlineMs) break;
    deadlineMs = Math.max(deadlineMs, atMs + extensionMs - leaseMarginMs);
  }
  return deadlineMs;
}

/** n: how many of D's ranks P's rank waits for. */
function doneNotification(
  engine: RemoteEngine | RefusedEngine,
  { requestId, lease }: RemoteRequest,
): Uint8Array {
  const { features } = engine;
  const readers = isRefused(engine) ? engine.notifiers : engine.plan.localConsumers;
  const { capability } = lease ?? {};
  return capability !== undefined && features.has(REQUEST_CONTROL)
    ? encodeRequestControl({ kind: "done", requestId, readers, capability })
    : encodeNotification({ kind: "done", requestId, readers });
}

function keyOf({ engineId, requestId, lease }: RemoteRequest): string {
  return JSON.stringify([engineId, requestId, lease?.capability]);
}

function promptMismatch(
  { requestId, remote }: ReceiveOrder,
  reply: "differs" | "unknown",
): KvError {
  const { engineId, requestId: remoteRequestId, prompt } = remote;
  const what =
    prompt === undefined || reply === "unknown"
      ? `${reply === "unknown" ? `engine ${engineId}` : "the engine of this request"} handed its connector no token ids to compare`
      : `its first ${prompt.numTokens} tokens, or what else decides its KV, differ`;
  return new KvError(
    "KV_PROMPT_MISMATCH",
    `request ${requestId} is not the prompt whose KV engine ${engineId} keeps for request ${remoteRequestId}: ${what}; the bytes that were read are not used`,
    {
      hint: "send a decode worker the prompt of the prefill request, and a prefill worker a prompt that goes on from the decode worker's tokens, with the same model, LoRA adapter, cache salt and images",
      details: { engineId, requestId: remoteRequestId, numTokens: prompt?.numTokens },
    },
  );
}

/** P does not hold the blocks, or another process (`answeredBy`) answered. */
function blocksNotHeld(
  { engineId, requestId }: RemoteRequest,
  incarnation: string | undefined,
  answeredBy: string,
): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `engine ${engineId} did not keep the blocks of request ${requestId} until they were read: the bytes that were read are not used`,
    {
      hint: "the lease ended, another reader was done with the request, or the worker was restarted; send the prompt to it again",
      details: { engineId, requestId, incarnation, answeredBy },
    },
  );
}

function leaseEnded({ engineId, requestId }: RemoteRequest, lateMs: number): KvError {
  return new KvError(
    "KV_LEASE_EXPIRED",
    `engine ${engineId} was guaranteed to hold the blocks of request ${requestId} only until ${Math.ceil(lateMs)} ms ago: its READ is not used`,
    {
      hint: "raise kv_lease_duration on both sides, or give decode workers more blocks",
      details: { lateMs },
    },
  );
}
