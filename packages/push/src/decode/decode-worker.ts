import {
  type AwaitedRequest,
  type AwaitedRequests,
  createAwaitedRequests,
  createBackground,
  createKeepAlive,
  type FreshLinkOptions,
  idleWithin,
  type KeepAlive,
  type Messages,
  type Outbox,
  type ReceiveBroken,
  type TransferMetrics,
  tellPeer,
} from "@kv/connector";
import { type Clock, KvError, type Log } from "@kv/interface";
import type { Ended } from "../control.js";
import type { PushStepMetadata, RegistrationOrder } from "../step-metadata.js";
import type { ReceivingEngine } from "./plan-receive.js";
import { ProducerLiveness } from "./producer-liveness.js";
import { PushReplies } from "./push-replies.js";
import { type ReceivePushOptions, receivePush } from "./receive-push.js";
import { RegistrationSender } from "./registration-sender.js";

/** What a decode worker is made of, and its times. */
export interface DecodeWorkerOptions
  extends FreshLinkOptions,
    ReceivingEngine,
    Pick<ReceivePushOptions, "receivePass" | "blocksAtRiskMs"> {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly outbox: Outbox;
  readonly messages: Messages;
  /** This engine and this rank of it. */
  readonly engineId: string;
  readonly tpRank: number;
  /** The time between two heartbeats, in milliseconds. */
  readonly heartbeatIntervalMs: number;
  /** From the registration to the KV in place, in milliseconds. */
  readonly registrationTimeoutMs: number;
  /** How long a probe of a producer may take, in milliseconds. */
  readonly handshakeTimeoutMs: number;
}

/** The part of a step that concerns the consumer. */
export type DecodeWorkerStep = Pick<
  PushStepMetadata,
  "incarnation" | "registrations" | "withdrawals" | "heartbeats"
>;

/** Failures before any rank of the producer knew the blocks. */
const NOT_REGISTERED = ["push_reg_handshake_failed", "transfer_setup_failed"];

/**
 * The consumer's half of a worker. Each registration runs on its own: it waits for the handshake, then for the reply of each of the
 * producer's ranks, and ends in the outbox, at its deadline at the latest.
 */
export class DecodeWorker {
  readonly #options: DecodeWorkerOptions;
  readonly #receives = createBackground();
  /** Notifications of requests that need no KV. */
  readonly #releases = createBackground();
  readonly #replies: PushReplies;
  readonly #sender: RegistrationSender;
  readonly #liveness: ProducerLiveness;
  readonly #awaited: AwaitedRequests<RegistrationOrder>;
  readonly #receiveOptions: ReceivePushOptions;
  readonly #heartbeats: KeepAlive;
  /** The registrations that wait, by wire id. */
  readonly #byWireId = new Map<string, RegistrationOrder>();
  #closed = false;

  constructor(options: DecodeWorkerOptions) {
    const { clock, log, outbox, peers, messages } = options;
    this.#options = options;
    this.#replies = new PushReplies({ clock });
    this.#sender = new RegistrationSender(options);
    this.#awaited = createAwaitedRequests({
      clock,
      log,
      outbox,
      background: this.#receives,
      timeoutMs: options.registrationTimeoutMs,
      // With several KV cache groups a block id of one does not say which block is invalid: the request id does.
      singleGroup: options.groups.length === 1,
    });
    this.#liveness = new ProducerLiveness({
      ...options,
      awaited: this.#awaited,
      probeTimeoutMs: options.handshakeTimeoutMs,
    });
    this.#receiveOptions = { ...options, sender: this.#sender, liveness: this.#liveness };
    this.#heartbeats = createKeepAlive({
      clock,
      intervalMs: options.heartbeatIntervalMs,
      peers,
      messages,
      beaten: ({ engineId }, delivered) => {
        if (delivered) this.#liveness.heartbeatDelivered(engineId);
        else this.#releases.track(this.#liveness.heartbeatFailed(engineId));
      },
      track: (work) => this.#releases.track(work),
    });
  }

  /** Takes the registrations, the requests that the engine gave up, and the heartbeats. */
  step({ incarnation, registrations, withdrawals, heartbeats }: DecodeWorkerStep): void {
    this.#sender.incarnation = incarnation;
    for (const order of registrations) {
      if (order.awaited) this.#receive(order);
      else this.#release(order);
    }
    for (const requestId of withdrawals) {
      this.#awaited.abort(requestId, new KvError("KV_REQUEST_ABORTED", `request ${requestId} was aborted`));
    }
    if (heartbeats !== null) this.#heartbeats.replace(heartbeats);
  }

  /** Takes a done notification: the producer's rank with the agent `from` has written its share. */
  done(wireId: string, from: string): void {
    if (this.#replies.done(wireId, from)) return;
    this.#options.metrics.notificationAfterExpiry();
    this.#options.log.debug("notification-for-unknown-request", { requestId: wireId, from });
  }

  /** Takes an ended notice (`push_ended`): the producer's rank with the agent `from` does not write, or has stopped. */
  ended({ wireId, incarnation, generation, code, message }: Ended, from: string): void {
    const order = this.#byWireId.get(wireId);
    const isCurrent = incarnation === this.#sender.incarnation && order?.generation === generation;
    if (order === undefined || !isCurrent) return;
    const reason = `engine ${order.remote.engineId} does not write request ${wireId}: ${message}`;
    this.#replies.ended(wireId, from, new KvError(code, reason));
  }

  /** The numbers of requests that wait, notifications on their way, and producers that get heartbeats; all are 0 when nothing is left. */
  outstanding(): { receives: number; tells: number; heartbeats: number } {
    return {
      receives: this.#awaited.size,
      tells: this.#releases.size + this.#options.messages.size,
      heartbeats: this.#heartbeats.size,
    };
  }

  /**
   * Withdraws all registrations, and waits until no WRITE can arrive any more, for `CLOSE_GRACE_MS` at most. Requests that still wait
   * then are abandoned without a report: their blocks may be written to until the agent is closed.
   */
  async close(): Promise<void> {
    const { clock, log, messages } = this.#options;
    this.#closed = true;
    this.#heartbeats.close();
    this.#awaited.abortAll(new KvError("KV_AGENT_CLOSED", "the worker was closed"));
    if (await idleWithin(clock, [this.#receives, this.#releases, messages])) return;
    log.warn("close-did-not-wait", {
      receives: this.#receives.size,
      tells: this.#releases.size + messages.size,
    });
    this.#awaited.abandonAll();
    this.#liveness.close();
    this.#replies.abandonAll();
  }

  #receive(order: RegistrationOrder): void {
    this.#awaited.start(order, {
      run: (request) => this.#run(request),
      ended: (_request, broken) => this.#ended(order, broken),
    });
  }

  #run({ order, signal, blocksAtRisk }: AwaitedRequest<RegistrationOrder>): Promise<void> {
    this.#byWireId.set(order.wireId, order);
    const replies = this.#replies.open(order.wireId);
    return receivePush({ order, signal, replies, blocksAtRisk }, this.#receiveOptions);
  }

  #ended(order: RegistrationOrder, broken: ReceiveBroken | undefined): void {
    this.#byWireId.delete(order.wireId);
    this.#replies.close(order.wireId);
    if (broken !== undefined && NOT_REGISTERED.includes(broken.failureType)) this.#release(order);
  }

  /** Withdraws a request that needs no KV, so that the producer frees its blocks. A vLLM producer frees them when the lease ends. */
  #release(order: RegistrationOrder): void {
    if (this.#closed) return;
    const { peers, log } = this.#options;
    tellPeer(order.remote, (link) => this.#sender.withdraw(order, link, link.agents.values()), {
      peers,
      background: this.#releases,
      failed: (error) =>
        log.debug("push-withdrawal-failed", { requestId: order.requestId, error: String(error) }),
    });
  }
}
