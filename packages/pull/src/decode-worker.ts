import {
  HeartbeatSender,
  idleWithinGrace,
  type PendingReceive,
  PendingReceives,
  type ReceiveError,
  RemoteEngines,
  TaskTracker,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { PullReceiver } from "./receive.js";
import type { PullStepMetadata, ReceiveOrder } from "./step-metadata.js";

/**
 * D's half of a worker. Every order of the scheduler becomes a separate receive, which waits for the handshake with its P without delaying the
 * step. Its outcome is in the worker's output at its deadline at the latest.
 */
export class DecodeWorker {
  /** The P's that this rank reads from. */
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #heartbeats: HeartbeatSender;
  readonly #receiver: PullReceiver;
  readonly #receives: PendingReceives<ReceiveOrder>;
  /** Running receives. */
  readonly #running = new TaskTracker();
  /** Notifications and heartbeats that are being sent. */
  readonly #sending = new TaskTracker();

  constructor(context: WorkerContext) {
    const { clock, log, notifications, output, settings, caches, tracer } = context;
    this.#context = context;
    this.engines = new RemoteEngines(context, {
      failureType: "handshake_setup_failed",
      joinsGroups: true,
    });
    this.#heartbeats = new HeartbeatSender({
      clock,
      intervalMs: settings.heartbeatIntervalMs,
      engines: this.engines.table,
      notifications,
      tasks: this.#sending,
    });
    this.#receiver = new PullReceiver({ context, engines: this.engines, heartbeats: this.#heartbeats });
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
        run: ({ order, signal }) => this.#receiver.receive(order, signal),
        ended: (receive, error) => this.#ended(receive, error),
      },
    );
  }

  /** Starts and aborts receives, and extends leases, as the scheduler orders. */
  step({ receives, aborts, heartbeats, schedulerClockMs }: PullStepMetadata): void {
    const nowMs = this.#context.clock.now();
    for (const order of receives) {
      // The scheduler's clock may have another origin than this worker's.
      const seenAtMs = nowMs - (schedulerClockMs - order.seenAtMs);
      if (order.isAwaited) this.#receives.start({ ...order, seenAtMs });
      else this.#notifyNothingRead(order);
    }
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
    if (await idleWithinGrace(clock, [this.#running, this.#sending, notifications])) return;
    log.warn("close-did-not-wait", {
      receives: this.#running.size,
      notifications: this.#sending.size + notifications.size,
    });
  }

  #ended({ order, signal, isAborted }: PendingReceive<ReceiveOrder>, error: ReceiveError | undefined): void {
    // Aborted before the handshake: P was not notified yet.
    if (signal.aborted && error?.failureType === "handshake_failed") this.#notifyNothingRead(order);
    if (!isAborted && error?.failureType === "lease_expired") this.#context.metrics.leaseExpired();
  }

  /** Notifies P that it may free the request's blocks. */
  #notifyNothingRead({ remote }: ReceiveOrder): void {
    const { log, metrics } = this.#context;
    this.#sending.track(
      this.engines.notify(
        remote,
        (engine) => this.#receiver.notifyDone(engine, remote, engine.agents.keys()),
        (error) => {
          metrics.notificationFailed();
          log.warn("notification_failed", { requestId: remote.requestId, error: String(error) });
        },
      ),
    );
  }
}
