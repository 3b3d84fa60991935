import {
  HeartbeatSender,
  idleWithinGrace,
  type PendingReceive,
  PendingReceives,
  planPrefillEngine,
  type ReceiveError,
  RemoteEngines,
  TaskTracker,
  type WorkerContext,
  type WorkerHalf,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { BlockReleases } from "./block-releases.js";
import { PullReceiver } from "./receive.js";
import type { PullStepMetadata, ReceiveOrder } from "./step-metadata.js";

/**
 * D's half of a worker. Every order of the scheduler becomes a separate receive, which waits for the handshake with its P without delaying the
 * step. Its outcome is in the worker's output at its deadline at the latest.
 */
export class DecodeWorker implements WorkerHalf<PullStepMetadata> {
  /** The P's that this rank reads from. */
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #heartbeats: HeartbeatSender;
  readonly #receiver: PullReceiver;
  readonly #releases: BlockReleases;
  readonly #receives: PendingReceives<ReceiveOrder>;
  /** Running receives. */
  readonly #running = new TaskTracker();
  /** Notifications and heartbeats that are being sent. */
  readonly #sending = new TaskTracker();

  constructor(context: WorkerContext) {
    const { clock, log, notifications, output, settings, caches, tracer } = context;
    this.#context = context;
    this.engines = new RemoteEngines(context, {
      ...{ failureType: "handshake_setup_failed", role: "prefill" },
      plan: (_, answer) => planPrefillEngine(context, answer, { joinsGroups: true }),
    });
    this.#heartbeats = new HeartbeatSender({
      clock,
      intervalMs: settings.heartbeatIntervalMs,
      engines: this.engines,
      notifications,
      tasks: this.#sending,
    });
    this.#releases = new BlockReleases({ context, engines: this.engines, tasks: this.#sending });
    this.#receiver = new PullReceiver({
      context,
      engines: this.engines,
      heartbeats: this.#heartbeats,
      releases: this.#releases,
    });
    this.#receives = new PendingReceives<ReceiveOrder>(
      {
        clock,
        log,
        output,
        tracer,
        tasks: this.#running,
        timeoutMs: settings.requestTimeoutMs,
        hasSingleGroup: caches.config.groups.length === 1,
      },
      {
        run: (receive) => this.#receiver.receive(receive),
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
    for (const remote of releases) this.#releases.release(remote);
    for (const requestId of aborts) {
      this.#receives.abort(requestId, new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`));
    }
    this.#heartbeats.change(heartbeats);
  }

  /** Numbers of receives, of notifications that are being sent, and of leases that are extended. */
  outstanding(): { readonly receives: number; readonly notifications: number; readonly heartbeats: number } {
    return {
      receives: this.#receives.size,
      notifications: this.#sending.size + this.#context.notifications.size,
      heartbeats: this.#heartbeats.size,
    };
  }

  /** Fails every receive, and waits until no transfer can touch memory any more; at most `CLOSE_GRACE_MS`. */
  async close(): Promise<void> {
    const { clock, log, notifications } = this.#context;
    this.#heartbeats.close();
    for (const receive of this.#receives.values())
      receive.fail(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
    if (this.#running.size === 0) this.#releases.releaseAll();
    else void this.#running.idle().then(() => this.#releases.releaseAll());
    if (await idleWithinGrace(clock, [this.#running, this.#sending, notifications])) return;
    log.warn("close-did-not-wait", {
      receives: this.#running.size,
      notifications: this.#sending.size + notifications.size,
    });
  }

  #ended({ order, signal, isAborted }: PendingReceive<ReceiveOrder>, error: ReceiveError | undefined): void {
    // P refuses handshakes or does not answer: it is not asked once more, only to be notified.
    if (error?.failureType === "handshake_failed" && !signal.aborted)
      this.#releases.unreachable(order.remote);
    if (!isAborted && error?.failureType === "lease_expired") this.#context.metrics.leaseExpired();
  }
}
