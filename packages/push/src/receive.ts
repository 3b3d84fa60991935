import {
  type PendingReceive,
  ReceiveError,
  type RemoteEngine,
  type RemoteEngines,
  traced,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError, type Timer } from "@kv/interface";
import { planRequest, type RequestPlan } from "@kv/plan";
import { encodeRegistration, encodeWithdrawal, PUSH_CONTROL, type Registrant } from "@kv/protocol";
import { isSameAgent, type ProducerLiveness } from "./producer-liveness.js";
import { assertVllmCanWrite, placeholderBlocks } from "./receive-plan.js";
import type { RegistrationReplies } from "./registration-replies.js";
import type { RegistrationOrder } from "./step-metadata.js";

/** The parts of D's worker that a receive uses. */
export interface ReceivePushOptions {
  readonly context: WorkerContext;
  readonly engines: Pick<RemoteEngines, "acquire" | "drop">;
  readonly liveness: ProducerLiveness;
  registrant(): Registrant;
}

/** How often a withdrawal is repeated until it is answered. */
const WITHDRAWAL_REPEAT_MS = 1000;
/** How long a failed request waits for the answer before it is reported with its blocks at risk. */
const REPORT_GRACE_MS = 500;

/**
 * Receives the KV of one request that a producer writes: registers the blocks, waits for the done
 * notification of each of the producer's ranks, then runs the receive pass. Settles when no WRITE
 * can arrive any more; or after `decoderBlocksTtlMs`, or when the worker abandons it, although a
 * WRITE may still arrive. A vLLM P does not compare the prompts, and never says that it will not
 * write.
 * @throws `ReceiveError`.
 */
export async function receivePush(
  receive: PendingReceive<RegistrationOrder>,
  replies: RegistrationReplies,
  options: ReceivePushOptions,
): Promise<void> {
  const { engine, release } = await receive.open(options.engines, "push_reg_handshake_failed");
  receive.engine = engine;
  try {
    if (!engine.features.has(PUSH_CONTROL))
      receive.allow(options.context.settings.registrationTimeoutMs);
    await new PushReceive(receive, replies, engine, options).run();
    receive.isVerified = engine.features.has(PUSH_CONTROL);
  } finally {
    release();
  }
}

/** A request whose P is open. */
class PushReceive {
  readonly #receive: PendingReceive<RegistrationOrder>;
  readonly #replies: RegistrationReplies;
  readonly #engine: RemoteEngine;
  readonly #options: ReceivePushOptions;
  readonly #agents: readonly string[];
  readonly #unregistered = new Set<string>();

  constructor(
    receive: PendingReceive<RegistrationOrder>,
    replies: RegistrationReplies,
    engine: RemoteEngine,
    options: ReceivePushOptions,
  ) {
    this.#receive = receive;
    this.#replies = replies;
    this.#engine = engine;
    this.#options = options;
    this.#agents = [...engine.agents.values()];
  }

  async run(): Promise<void> {
    const { order } = this.#receive;
    const { context } = this.#options;
    const plan = traced(context.tracer, "kv.plan", { parent: order.remote.traceparent }, () =>
      planReceive(this.#engine, order, context),
    );
    const failure = await this.#registerAndWait();
    if (failure !== undefined) {
      await this.#waitUntilSafe(failure);
      throw failure;
    }
    await this.#receive.pass(this.#engine, plan);
  }

  /**
   * Registers the blocks with every rank and waits for the replies. Undefined if every rank has
   * written its share, else the failure.
   */
  async #registerAndWait(): Promise<ReceiveError | undefined> {
    const receive = this.#receive;
    const { order, signal } = receive;
    // No rank knows the blocks yet.
    if (signal.aborted) throw receive.error(signal.reason, "push_reg_handshake_failed");
    const aborted = new Promise<void>((resolve) => {
      signal.addEventListener("abort", () => resolve());
    });
    let registering = true;
    const registered = Promise.all(this.#agents.map((agent) => this.#register(agent))).then(() => {
      registering = false;
    });
    for (;;) {
      if (this.#agents.every((agent) => this.#hasWritten(agent))) return undefined;
      for (const error of this.#replies.ended.values()) return receive.error(error, "push_refused");
      if (this.#agents.some((agent) => this.#hasFailed(agent))) {
        const { engineId } = order.remote;
        const why = `engine ${engineId} could not write all KV of request ${order.requestId}`;
        return receive.error(new KvError("KV_TRANSFER_FAILED", why), "push_refused");
      }
      if (signal.aborted) return receive.error(signal.reason, "push_timed_out");
      if (!registering && this.#unregistered.size > 0) {
        const error = new KvError(
          "KV_NOTIFICATION_FAILED",
          `the blocks of request ${order.requestId} could not be registered with engine ${order.remote.engineId}`,
        );
        return receive.error(error, "push_reg_notif_failed");
      }
      await Promise.race([this.#replies.next(), aborted, ...(registering ? [registered] : [])]);
    }
  }

  /**
   * Whether a rank of P has said that it has written. One of our own must say it with the
   * registration's secret.
   */
  #hasWritten(agent: string): boolean {
    const { done, written } = this.#replies;
    return this.#engine.features.has(PUSH_CONTROL) ? written.has(agent) : done.has(agent);
  }

  /**
   * Whether a rank of a vLLM P has said that it does not write. One of our own says it with the
   * registration's secret.
   */
  #hasFailed(agent: string): boolean {
    return !this.#engine.features.has(PUSH_CONTROL) && this.#replies.failed.has(agent);
  }

  /**
   * Registers the blocks with one rank. Where the transport cannot send the message, the rank is
   * `unregistered`, and the engine is dropped.
   */
  #register(agent: string): Promise<unknown> {
    const { order } = this.#receive;
    const { context, engines, registrant } = this.#options;
    const { notifications, metrics, log, tracer } = context;
    const payload = encodeRegistration(
      order,
      registrant(),
      this.#engine.features.has(PUSH_CONTROL),
    );
    const attributes = { "kv.remote_agent": agent };
    return traced(tracer, "kv.register", { parent: order.remote.traceparent, attributes }, (span) =>
      notifications.send(agent, payload, (error) => {
        this.#unregistered.add(agent);
        metrics.notificationFailed();
        span?.end(error);
        log.warn("push_reg_notif_failed", {
          requestId: order.requestId,
          agent,
          error: String(error),
        });
        engines.drop(this.#engine, String(error));
      }),
    );
  }

  /**
   * Withdraws the registration, and waits until each rank that may write has replied, the
   * producer's process is gone, or further waiting is useless. Reports the blocks as at risk when
   * that takes longer than `REPORT_GRACE_MS`.
   */
  async #waitUntilSafe(failure: ReceiveError): Promise<void> {
    const { order } = this.#receive;
    const { context, liveness, registrant } = this.#options;
    const { clock, settings } = context;
    const replies = this.#replies;
    const startedMs = clock.now();
    const giveUpMs = startedMs + settings.decoderBlocksTtlMs;
    const reportMs = startedMs + REPORT_GRACE_MS;
    const mayWrite = this.#mayWrite();
    const silent = () =>
      replies.abandoned
        ? []
        : mayWrite.filter(
            (agent) =>
              !this.#hasWritten(agent) && !this.#hasFailed(agent) && !replies.ended.has(agent),
          );
    let reported = false;
    for (let round = 0; silent().length > 0; round++) {
      withdrawRegistration(context, order, registrant(), this.#engine, silent());
      const roundEndsMs = Math.min(clock.now() + WITHDRAWAL_REPEAT_MS, giveUpMs);
      while (silent().length > 0 && clock.now() < roundEndsMs) {
        if (!reported && clock.now() >= reportMs) {
          reported = true;
          this.#receive.reportBlocksAtRisk(failure);
        }
        const untilMs = reported ? roundEndsMs : Math.min(roundEndsMs, reportMs);
        await this.#nextReply(Math.max(1, Math.ceil(untilMs - clock.now())));
      }
      if (silent().length === 0 || clock.now() >= giveUpMs) return;
      // A vLLM process sends no incarnation: a restart cannot be detected.
      if (this.#engine.incarnation === undefined || round === 0) continue;
      const reply = await liveness.probe(order);
      if (reply !== undefined && !isSameAgent(this.#engine, reply)) return;
    }
  }

  /** The agents of the ranks that may write to the registered blocks. */
  #mayWrite(): readonly string[] {
    // A vLLM rank writes to all of our ranks as soon as one of them has registered.
    const othersRegister =
      !this.#engine.features.has(PUSH_CONTROL) &&
      this.#options.context.options.engine.tpSize > this.#engine.address.tpSize;
    return othersRegister
      ? this.#agents
      : this.#agents.filter((agent) => !this.#unregistered.has(agent));
  }

  async #nextReply(timeoutMs: number): Promise<void> {
    let timer: Timer | undefined;
    const late = new Promise<void>((resolve) => {
      timer = this.#options.context.clock.setTimer(resolve, timeoutMs);
    });
    await Promise.race([this.#replies.next(), late]);
    timer?.cancel();
  }
}

/**
 * Withdraws the order's blocks from these ranks. Best effort: if the message is lost, it is
 * repeated, or P frees the blocks when the lease ends. A vLLM producer gets no withdrawal, because
 * its protocol has none.
 */
export function withdrawRegistration(
  { notifications, log }: Pick<WorkerContext, "notifications" | "log">,
  order: RegistrationOrder,
  registrant: Registrant,
  engine: RemoteEngine,
  agents: Iterable<string>,
): void {
  if (!engine.features.has(PUSH_CONTROL)) return;
  const payload = encodeWithdrawal(order, registrant);
  for (const agent of agents) {
    void notifications.send(agent, payload, (error) =>
      log.debug("push-withdrawal-failed", {
        requestId: order.requestId,
        agent,
        error: String(error),
      }),
    );
  }
}

/**
 * Plans the receive pass of a request whose blocks a producer will write. An incompatible pair is
 * refused here, before a block is registered.
 * @throws `ReceiveError` with `transfer_setup_failed` and `KV_PLAN_UNSUPPORTED`,
 * `KV_BLOCKS_MISMATCH` or those of `planRequest`.
 */
export function planReceive(
  engine: RemoteEngine,
  order: RegistrationOrder,
  { caches, model, options }: Pick<WorkerContext, "caches" | "model" | "options">,
): RequestPlan {
  try {
    if (!engine.features.has(PUSH_CONTROL)) assertVllmCanWrite(engine, order, model);
    return planRequest(engine.plan, {
      localBlockIds: order.localBlockIds,
      // Only the number of the producer's blocks matters here: it determines where ours begin.
      remoteBlockIds:
        order.remoteBlockIds ?? placeholderBlocks(order, engine, caches.config.groups),
      numTokens: order.numTokens,
      localComputedBlocks: order.localComputedBlocks,
    });
  } catch (error) {
    throw new ReceiveError(
      KvError.from(
        error,
        "KV_TRANSFER_INVALID",
        `request ${order.requestId} on ${options.engine.tpSize} ranks`,
      ),
      "transfer_setup_failed",
    );
  }
}
