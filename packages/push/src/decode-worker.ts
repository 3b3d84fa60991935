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
import {
  decodePushControl,
  type KvNotification,
  type RegistrationEnded,
  type RegistrationWritten,
  sameCapability,
} from "@kv/protocol";
import { ProducerLiveness } from "./producer-liveness.js";
import { type ReceivePushOptions, receivePush, withdrawRegistration } from "./receive.js";
import { PushReplies } from "./registration-replies.js";
import type { PushStepMetadata, RegistrationOrder } from "./step-metadata.js";

/** The part of a step that concerns D. */
export type DecodeWorkerStep = Pick<
  PushStepMetadata,
  "incarnation" | "registrations" | "withdrawals" | "heartbeats"
>;

/** Failures that occur before any rank of P knows the blocks. */
const NOT_REGISTERED = ["push_reg_handshake_failed", "transfer_setup_failed"];

/**
 * D's half of a worker. Each registration runs independently: it waits for the handshake, then for
 * the reply of each of P's ranks. Its outcome is in the worker's output at its deadline at the
 * latest.
 */
export class DecodeWorker implements WorkerHalf<DecodeWorkerStep> {
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #running = new TaskTracker();
  /** Notifications of requests that need no KV, and heartbeats. */
  readonly #sending = new TaskTracker();
  readonly #replies: PushReplies;
  readonly #liveness: ProducerLiveness;
  readonly #receives: PendingReceives<RegistrationOrder>;
  readonly #receiveOptions: ReceivePushOptions;
  readonly #heartbeats: HeartbeatSender;
  readonly #byWireId = new Map<string, RegistrationOrder>();
  #incarnation = "";
  #closed = false;

  constructor(context: WorkerContext) {
    const { clock, settings, options } = context;
    this.#context = context;
    this.engines = new RemoteEngines(context, {
      failureType: "push_reg_handshake_failed",
      role: "prefill",
      plan: (_, answer) => planPrefillEngine(context, answer, { preparesLists: false }),
    });
    this.#replies = new PushReplies({ clock });
    this.#receives = new PendingReceives<RegistrationOrder>(
      { ...context, tasks: this.#running, timeoutMs: settings.kvPeerRegistrationTimeoutMs },
      {
        run: (receive) => this.#run(receive),
        ended: (receive, error) => this.#ended(receive, error),
      },
    );
    this.#liveness = new ProducerLiveness({
      clock,
      engines: this.engines,
      receives: this.#receives,
      probeTimeoutMs: settings.handshakeTimeoutMs,
    });
    const { engineId, tpSize, dcpSize } = options.engine;
    this.#receiveOptions = {
      context,
      engines: this.engines,
      liveness: this.#liveness,
      registrant: () => ({
        engineId,
        tpSize,
        dcpSize,
        tpRank: options.tpRank,
        incarnation: this.#incarnation,
      }),
    };
    this.#heartbeats = new HeartbeatSender({
      ...context,
      intervalMs: settings.heartbeatIntervalMs,
      engines: this.engines,
      tasks: this.#sending,
      onSent: (engine, isDelivered) => {
        if (isDelivered) this.#liveness.heartbeatDelivered(engine);
        else this.#sending.track(this.#liveness.heartbeatFailed(engine));
      },
    });
  }

  /**
   * Takes the registrations, the withdrawals of requests that the engine aborted, and the
   * heartbeats.
   */
  step({ incarnation, registrations, withdrawals, heartbeats }: DecodeWorkerStep): void {
    this.#incarnation = incarnation;
    for (const order of registrations) {
      if (order.isAwaited) this.#receives.start(order);
      else this.#release(order);
    }
    for (const requestId of withdrawals) {
      this.#receives.abort(
        requestId,
        new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`),
      );
    }
    this.#heartbeats.change(heartbeats);
  }

  notified(notification: KvNotification, from: string): boolean {
    if (notification.kind === "done") {
      this.#heard("done", notification.requestId, from);
      return true;
    }
    if (notification.kind === "push-failure") {
      this.#heard("failed", notification.requestId, from);
      return true;
    }
    const message =
      notification.kind === "extension" ? decodePushControl(notification.message) : undefined;
    if (message?.kind === "written") this.#written(message.written, from);
    else if (message?.kind === "ended") this.#endedAtProducer(message.ended, from);
    else return false;
    return true;
  }

  /**
   * Takes a notice with the registration's secret: P's rank with the agent `from` has written its
   * share.
   */
  #written({ wireId, secret }: RegistrationWritten, from: string): void {
    const order = this.#byWireId.get(wireId);
    if (order !== undefined && sameCapability(order.secret, secret))
      this.#heard("written", wireId, from);
    else this.#notificationIgnored(wireId, from);
  }

  /** Takes what P's rank with the agent `from` says about a registration. */
  #heard(reply: "done" | "failed" | "written", wireId: string, from: string): void {
    if (!this.#replies.add(reply, wireId, from)) this.#notificationIgnored(wireId, from);
  }

  /**
   * Takes an ended notice (`push_ended`): P's rank with the agent `from` does not write, or has
   * stopped.
   */
  #endedAtProducer(ended: RegistrationEnded, from: string): void {
    const { wireId, incarnation, generation, secret, code, message } = ended;
    const order = this.#byWireId.get(wireId);
    const isCurrent = incarnation === this.#incarnation && order?.generation === generation;
    if (order === undefined || !isCurrent || !sameCapability(order.secret, secret)) return;
    const reason = `engine ${order.remote.engineId} does not write request ${wireId}: ${message}`;
    this.#replies.ended(wireId, from, new KvError(code, reason));
  }

  /**
   * Numbers of requests that wait, of notifications that are being sent, and of leases that are
   * extended; all 0 when nothing is held.
   */
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
   * Withdraws all registrations, and waits until no WRITE can arrive any more, for `CLOSE_GRACE_MS`
   * at most. Requests that still wait then are abandoned, without a report where no reason is
   * given: their blocks may be written to until the agent is closed.
   */
  async close(reason?: KvError): Promise<void> {
    const { clock, log, notifications } = this.#context;
    this.#closed = true;
    this.#heartbeats.close();
    for (const receive of this.#receives.values()) {
      if (reason === undefined)
        receive.abort(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
      else receive.fail(reason);
    }
    if (await idleWithinGrace(clock, [this.#running, this.#sending, notifications])) return;
    log.warn("close-did-not-wait", {
      receives: this.#running.size,
      notifications: this.#sending.size + notifications.size,
    });
    if (reason === undefined) this.#receives.abandonAll();
    this.#liveness.close();
    this.#replies.abandonAll();
    if (reason !== undefined) await this.#running.idle();
  }

  #notificationIgnored(requestId: string, from: string): void {
    this.#context.metrics.notificationAfterExpiry();
    this.#context.log.debug("notification-for-unknown-request", { requestId, from });
  }

  #run(receive: PendingReceive<RegistrationOrder>): Promise<void> {
    const { order } = receive;
    this.#byWireId.set(order.wireId, order);
    return receivePush(receive, this.#replies.open(order.wireId), this.#receiveOptions);
  }

  #ended({ order }: PendingReceive<RegistrationOrder>, error: ReceiveError | undefined): void {
    this.#byWireId.delete(order.wireId);
    this.#replies.close(order.wireId);
    if (error !== undefined && NOT_REGISTERED.includes(error.failureType)) this.#release(order);
  }

  /**
   * Withdraws a request that needs no KV, so that P frees its blocks. A vLLM P frees them when the
   * lease ends.
   */
  #release(order: RegistrationOrder): void {
    if (this.#closed) return;
    const { log } = this.#context;
    const { registrant } = this.#receiveOptions;
    this.#sending.track(
      this.engines.notify(
        order.remote,
        (engine) =>
          withdrawRegistration(this.#context, order, registrant(), engine, engine.agents.values()),
        (error) =>
          log.debug("push-withdrawal-failed", { requestId: order.requestId, error: String(error) }),
      ),
    );
  }
}
