import {
  HeartbeatSender,
  idleWithinGrace,
  type PendingReceive,
  PendingReceives,
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
  sameCapability,
} from "@kv/protocol";
import { ProducerLiveness } from "./producer-liveness.js";
import {
  PushReplies,
  planProducer,
  type ReceivePushOptions,
  receivePush,
  withdrawRegistration,
} from "./receive.js";
import type { PushStepMetadata, RegistrationOrder } from "./step-metadata.js";

export type DecodeWorkerStep = Pick<
  PushStepMetadata,
  "incarnation" | "registrations" | "withdrawals" | "heartbeats"
>;

/** No rank of P knows the blocks yet. */
const NOT_REGISTERED = ["push_reg_handshake_failed", "transfer_setup_failed"];

/**
 * D's half of a worker. A registration waits for the handshake, then for each of P's ranks. It has
 * an outcome by its deadline.
 */
export class DecodeWorker implements WorkerHalf<DecodeWorkerStep> {
  readonly engines: RemoteEngines;
  readonly #context: WorkerContext;
  readonly #running = new TaskTracker();
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
      plan: (address, answer) => planProducer(context, address, answer),
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
    const { tpRank } = options;
    this.#receiveOptions = {
      context,
      engines: this.engines,
      liveness: this.#liveness,
      registrant: () => ({ engineId, tpSize, dcpSize, tpRank, incarnation: this.#incarnation }),
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

  step({ incarnation, registrations, withdrawals, heartbeats }: DecodeWorkerStep): void {
    this.#incarnation = incarnation;
    for (const order of registrations) {
      if (order.isAwaited) this.#receives.start(order);
      else this.#release(order);
    }
    for (const requestId of withdrawals) this.#receives.abort(requestId);
    this.#heartbeats.change(heartbeats);
  }

  notified(notification: KvNotification, from: string): boolean {
    switch (notification.kind) {
      case "done":
        this.#heard("done", notification.requestId, from);
        return true;
      case "push-failure":
        this.#heard("failed", notification.requestId, from);
        return true;
      case "extension": {
        const message = decodePushControl(notification.message);
        if (message?.kind === "ended") this.#endedAtProducer(message.ended, from);
        else if (message?.kind === "written") {
          const { wireId, secret } = message.written;
          const order = this.#byWireId.get(wireId);
          const isProven = order !== undefined && sameCapability(order.secret, secret);
          this.#heard(isProven ? "written" : undefined, wireId, from);
        } else return false;
        return true;
      }
      default:
        return false;
    }
  }

  /** What P's agent `from` says of a registration; undefined: nothing proven. */
  #heard(reply: "done" | "failed" | "written" | undefined, requestId: string, from: string): void {
    if (reply !== undefined && this.#replies.add(reply, requestId, from)) return;
    this.#context.metrics.notificationAfterExpiry();
    this.#context.log.debug("notification-for-unknown-request", { requestId, from });
  }

  /** `push_ended`: P's agent `from` does not write, or has stopped. */
  #endedAtProducer(ended: RegistrationEnded, from: string): void {
    const { wireId, incarnation, generation, secret, code, message } = ended;
    const order = this.#byWireId.get(wireId);
    const isCurrent = incarnation === this.#incarnation && order?.generation === generation;
    if (order === undefined || !isCurrent || !sameCapability(order.secret, secret)) return;
    const reason = `engine ${order.remote.engineId} does not write request ${wireId}: ${message}`;
    this.#replies.ended(wireId, from, new KvError(code, reason));
  }

  outstanding(): Record<"receives" | "registered" | "notifications" | "heartbeats", number> {
    return {
      receives: this.#receives.size,
      registered: this.#byWireId.size,
      notifications: this.#sending.size + this.#context.notifications.size,
      heartbeats: this.#heartbeats.size,
    };
  }

  /**
   * Withdraws all registrations and waits up to `CLOSE_GRACE_MS` until no WRITE can arrive.
   * Abandons the rest, and reports it only with a reason.
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

  /** P can free its blocks before the lease ends. */
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
