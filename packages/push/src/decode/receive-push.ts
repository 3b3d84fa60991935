import {
  type FailureType,
  type FreshLinkOptions,
  freshLink,
  type ReceiveBroken,
  type RemoteLink,
  receiveBroken,
} from "@kv/connector";
import { type Clock, KvError, type Timer } from "@kv/interface";
import type { RequestPlan } from "@kv/plan";
import { PUSH_CONTROL } from "../control.js";
import type { RegistrationOrder } from "../step-metadata.js";
import { planReceive, type ReceivingEngine } from "./plan-receive.js";
import type { ProducerLiveness } from "./producer-liveness.js";
import type { RegistrationReplies } from "./push-replies.js";
import type { RegistrationSender } from "./registration-sender.js";

/** What `receivePush` works with, the same for every request. */
export interface ReceivePushOptions extends ReceivingEngine, FreshLinkOptions {
  readonly clock: Clock;
  readonly sender: RegistrationSender;
  readonly liveness: ProducerLiveness;
  /** The pass after the last byte: what the plan leaves to do, such as a permutation, and the copy of a staging platform. */
  receivePass(order: RegistrationOrder, link: RemoteLink, plan: RequestPlan): Promise<void>;
  /** How long blocks stay out of use that a silent producer may still write to, in milliseconds. */
  readonly blocksAtRiskMs: number;
}

/** One request that waits for its KV. */
export interface PushedRequest {
  readonly order: RegistrationOrder;
  /** Aborts the request: at its deadline, or when the engine gives it up. */
  readonly signal: AbortSignal;
  readonly replies: RegistrationReplies;
  /** Called once if the request has failed and a producer may still write to its blocks after `REPORT_GRACE_MS`. */
  blocksAtRisk(broken: ReceiveBroken): void;
}

/** How often a withdrawal is repeated until it is answered. */
const WITHDRAWAL_REPEAT_MS = 1000;
/** How long a failed request waits for the answer before it is reported with its blocks at risk. */
const REPORT_GRACE_MS = 500;

/**
 * Receives the KV of one request that a producer writes: registers the blocks, waits for the done notification of each of the producer's
 * ranks, then runs the receive pass. Settles when no WRITE can arrive any more; or after `blocksAtRiskMs`, or when the worker abandons
 * it, although a WRITE may still arrive. Errors: `ReceiveBroken`.
 */
export async function receivePush(request: PushedRequest, options: ReceivePushOptions): Promise<void> {
  const { order, signal } = request;
  const hold = await freshLink(order.remote, signal, options).catch((error: unknown) => {
    throw receiveBroken(error, "KV_HANDSHAKE_REFUSED", "push_reg_handshake_failed", signal);
  });
  try {
    await new PushReceive(request, hold.peer, options).run();
  } finally {
    hold.release();
  }
}

/** A request whose link is open. */
class PushReceive {
  readonly #request: PushedRequest;
  readonly #link: RemoteLink;
  readonly #options: ReceivePushOptions;
  /** The agents of the producer's ranks. */
  readonly #agents: readonly string[];
  /** The agents whose registration the transport did not take. */
  readonly #unregistered = new Set<string>();

  constructor(request: PushedRequest, link: RemoteLink, options: ReceivePushOptions) {
    this.#request = request;
    this.#link = link;
    this.#options = options;
    this.#agents = [...link.agents.values()];
  }

  async run(): Promise<void> {
    const { order } = this.#request;
    const plan = planReceive(this.#link, order, this.#options);
    const failure = await this.#registerAndWait();
    if (failure !== undefined) {
      await this.#waitUntilSafe(failure);
      throw failure;
    }
    await this.#options.receivePass(order, this.#link, plan).catch((error: unknown) => {
      throw this.#broken(error, "transfer_exception");
    });
  }

  /** Registers the blocks with every rank and waits for the replies. Undefined if every rank has written its share, else the failure. */
  async #registerAndWait(): Promise<ReceiveBroken | undefined> {
    const { order, signal, replies } = this.#request;
    // No rank knows the blocks yet.
    if (signal.aborted) throw this.#broken(signal.reason, "push_reg_handshake_failed");
    const aborted = new Promise<void>((resolve) => {
      signal.addEventListener("abort", () => resolve());
    });
    let registering = true;
    const registered = this.#registerAll().then(() => {
      registering = false;
    });
    for (;;) {
      if (this.#agents.every((agent) => replies.done.has(agent))) return undefined;
      for (const error of replies.ended.values()) return this.#broken(error, "push_refused");
      if (signal.aborted) return this.#broken(signal.reason, "push_timed_out");
      if (!registering && this.#unregistered.size > 0) {
        const error = new KvError(
          "KV_NOTIFICATION_FAILED",
          `the blocks of request ${order.requestId} could not be registered with engine ${order.remote.engineId}`,
        );
        return this.#broken(error, "push_reg_notif_failed");
      }
      await Promise.race([replies.next(), aborted, ...(registering ? [registered] : [])]);
    }
  }

  async #registerAll(): Promise<void> {
    const { order } = this.#request;
    await Promise.all(
      this.#agents.map(async (agent) => {
        const taken = await this.#options.sender.register(order, this.#link, agent);
        if (!taken) this.#unregistered.add(agent);
      }),
    );
  }

  /**
   * Withdraws the registration, and waits until each rank that may write has replied, or the producer's process has gone, or waiting is
   * of no use any more. Reports the blocks as at risk when that takes longer than `REPORT_GRACE_MS`.
   */
  async #waitUntilSafe(failure: ReceiveBroken): Promise<void> {
    const { order, replies, blocksAtRisk } = this.#request;
    const { clock, sender, liveness, blocksAtRiskMs } = this.#options;
    const controls = this.#link.features.has(PUSH_CONTROL);
    const startedMs = clock.now();
    const giveUpMs = startedMs + blocksAtRiskMs;
    const reportMs = startedMs + REPORT_GRACE_MS;
    const mayWrite = this.#mayWrite();
    const silent = () =>
      replies.abandoned
        ? []
        : mayWrite.filter((agent) => !replies.done.has(agent) && !replies.ended.has(agent));
    let reported = false;
    for (let round = 0; silent().length > 0; round++) {
      if (controls) sender.withdraw(order, this.#link, silent());
      const roundEndsMs = Math.min(clock.now() + WITHDRAWAL_REPEAT_MS, giveUpMs);
      while (silent().length > 0 && clock.now() < roundEndsMs) {
        if (!reported && clock.now() >= reportMs) {
          reported = true;
          blocksAtRisk(failure);
        }
        const untilMs = reported ? roundEndsMs : Math.min(roundEndsMs, reportMs);
        await this.#nextReply(Math.max(1, Math.ceil(untilMs - clock.now())));
      }
      if (silent().length === 0 || clock.now() >= giveUpMs) return;
      // A vLLM process sends no incarnation: a restart cannot be detected.
      if (this.#link.incarnation === undefined || round === 0) continue;
      const process = await liveness.probe(order);
      if (process !== undefined && process !== this.#link.incarnation) return;
    }
  }

  /** The agents of the ranks that may write to the registered blocks. */
  #mayWrite(): readonly string[] {
    // A vLLM rank writes to all of our ranks as soon as one of them has registered.
    const othersRegister =
      !this.#link.features.has(PUSH_CONTROL) && this.#options.tpSize > this.#link.address.tpSize;
    return othersRegister ? this.#agents : this.#agents.filter((agent) => !this.#unregistered.has(agent));
  }

  async #nextReply(timeoutMs: number): Promise<void> {
    let timer: Timer | undefined;
    const late = new Promise<void>((resolve) => {
      timer = this.#options.clock.setTimer(resolve, timeoutMs);
    });
    await Promise.race([this.#request.replies.next(), late]);
    timer?.cancel();
  }

  #broken(error: unknown, type: FailureType): ReceiveBroken {
    return receiveBroken(error, "KV_TRANSFER_FAILED", type, this.#request.signal);
  }
}
