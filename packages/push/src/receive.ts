import {
  type FailureType,
  inSpan,
  ReceiveError,
  type ReceivePass,
  type RemoteEngine,
  type RemoteEngines,
  unreachablePeer,
} from "@kv/connector/building-blocks";
import {
  type BlockIds,
  type Clock,
  type KvCacheConfig,
  KvError,
  type Timer,
  type Tracer,
} from "@kv/interface";
import { exchangedBlocks, planRequest, type RequestPlan } from "@kv/plan";
import { PUSH_CONTROL } from "@kv/protocol";
import type { ProducerLiveness } from "./producer-liveness.js";
import type { RegistrationReplies } from "./push-replies.js";
import type { RegistrationSender } from "./registration-sender.js";
import type { RegistrationOrder } from "./step-metadata.js";

/** The properties of the consumer's engine that the plan of a receive pass needs. */
export interface ReceivingEngine {
  readonly groups: KvCacheConfig["groups"];
  readonly tpSize: number;
}

/** Options of `receivePush`, the same for every request. */
export interface ReceivePushOptions extends ReceivingEngine {
  readonly engines: Pick<RemoteEngines, "acquire">;
  readonly clock: Clock;
  readonly tracer: Tracer | undefined;
  readonly sender: RegistrationSender;
  readonly liveness: ProducerLiveness;
  /** Applied after the last byte. */
  readonly receivePass: ReceivePass;
  /** How long blocks are not reused that a silent producer may still write to, in milliseconds. */
  readonly blocksAtRiskMs: number;
}

/** One request that waits for its KV. */
export interface PushedRequest {
  readonly order: RegistrationOrder;
  /** Aborts the request at its deadline, or when the engine aborts it. */
  readonly signal: AbortSignal;
  readonly replies: RegistrationReplies;
  /** Called once if the request has failed and a producer may still write to its blocks after `REPORT_GRACE_MS`. */
  blocksAtRisk(error: ReceiveError): void;
}

/** How often a withdrawal is repeated until it is answered. */
const WITHDRAWAL_REPEAT_MS = 1000;
/** How long a failed request waits for the answer before it is reported with its blocks at risk. */
const REPORT_GRACE_MS = 500;

/**
 * Receives the KV of one request that a producer writes: registers the blocks, waits for the done notification of each of the producer's
 * ranks, then runs the receive pass. Settles when no WRITE can arrive any more; or after `blocksAtRiskMs`, or when the worker abandons
 * it, although a WRITE may still arrive. Returns whether P has compared the prompts: a vLLM P does not. Errors: `ReceiveError`.
 */
export async function receivePush(request: PushedRequest, options: ReceivePushOptions): Promise<boolean> {
  const { order, signal } = request;
  const reference = await options.engines.acquire(order.remote, signal).catch((error: unknown) => {
    throw ReceiveError.from(
      unreachablePeer(error),
      "KV_HANDSHAKE_REFUSED",
      "push_reg_handshake_failed",
      signal,
    );
  });
  try {
    await new PushReceive(request, reference.engine, options).run();
    return reference.engine.features.has(PUSH_CONTROL);
  } finally {
    reference.release();
  }
}

/** A request whose P is open. */
class PushReceive {
  readonly #request: PushedRequest;
  readonly #engine: RemoteEngine;
  readonly #options: ReceivePushOptions;
  /** The agents of the producer's ranks. */
  readonly #agents: readonly string[];
  /** The agents whose registration the transport could not send. */
  readonly #unregistered = new Set<string>();

  constructor(request: PushedRequest, engine: RemoteEngine, options: ReceivePushOptions) {
    this.#request = request;
    this.#engine = engine;
    this.#options = options;
    this.#agents = [...engine.agents.values()];
  }

  async run(): Promise<void> {
    const { order } = this.#request;
    const { tracer, receivePass } = this.#options;
    const parent = order.remote.traceparent;
    const plan = inSpan(tracer?.start("kv.plan", { parent }), () =>
      planReceive(this.#engine, order, this.#options),
    );
    const failure = await this.#registerAndWait();
    if (failure !== undefined) {
      await this.#waitUntilSafe(failure);
      throw failure;
    }
    try {
      if (plan.receivePass !== undefined)
        inSpan(tracer?.start("kv.receive_pass", { parent }), () => receivePass.apply(this.#engine, plan));
    } catch (error) {
      throw this.#error(error, "transfer_exception");
    }
  }

  /** Registers the blocks with every rank and waits for the replies. Undefined if every rank has written its share, else the failure. */
  async #registerAndWait(): Promise<ReceiveError | undefined> {
    const { order, signal, replies } = this.#request;
    // No rank knows the blocks yet.
    if (signal.aborted) throw this.#error(signal.reason, "push_reg_handshake_failed");
    const aborted = new Promise<void>((resolve) => {
      signal.addEventListener("abort", () => resolve());
    });
    let registering = true;
    const registered = this.#registerAll().then(() => {
      registering = false;
    });
    for (;;) {
      if (this.#agents.every((agent) => this.#hasWritten(agent))) return undefined;
      for (const error of replies.ended.values()) return this.#error(error, "push_refused");
      if (signal.aborted) return this.#error(signal.reason, "push_timed_out");
      if (!registering && this.#unregistered.size > 0) {
        const error = new KvError(
          "KV_NOTIFICATION_FAILED",
          `the blocks of request ${order.requestId} could not be registered with engine ${order.remote.engineId}`,
        );
        return this.#error(error, "push_reg_notif_failed");
      }
      await Promise.race([replies.next(), aborted, ...(registering ? [registered] : [])]);
    }
  }

  /** Whether a rank of P has said that it has written. One of our own must say it with the registration's secret. */
  #hasWritten(agent: string): boolean {
    const { done, written } = this.#request.replies;
    return this.#engine.features.has(PUSH_CONTROL) ? written.has(agent) : done.has(agent);
  }

  async #registerAll(): Promise<void> {
    const { order } = this.#request;
    await Promise.all(
      this.#agents.map(async (agent) => {
        const taken = await this.#options.sender.register(order, this.#engine, agent);
        if (!taken) this.#unregistered.add(agent);
      }),
    );
  }

  /**
   * Withdraws the registration, and waits until each rank that may write has replied, the producer's process is gone, or further waiting is
   * useless. Reports the blocks as at risk when that takes longer than `REPORT_GRACE_MS`.
   */
  async #waitUntilSafe(failure: ReceiveError): Promise<void> {
    const { order, replies, blocksAtRisk } = this.#request;
    const { clock, sender, liveness, blocksAtRiskMs } = this.#options;
    const controls = this.#engine.features.has(PUSH_CONTROL);
    const startedMs = clock.now();
    const giveUpMs = startedMs + blocksAtRiskMs;
    const reportMs = startedMs + REPORT_GRACE_MS;
    const mayWrite = this.#mayWrite();
    const silent = () =>
      replies.abandoned
        ? []
        : mayWrite.filter((agent) => !this.#hasWritten(agent) && !replies.ended.has(agent));
    let reported = false;
    for (let round = 0; silent().length > 0; round++) {
      if (controls) sender.withdraw(order, this.#engine, silent());
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
      if (this.#engine.incarnation === undefined || round === 0) continue;
      const process = await liveness.probe(order);
      if (process !== undefined && process !== this.#engine.incarnation) return;
    }
  }

  /** The agents of the ranks that may write to the registered blocks. */
  #mayWrite(): readonly string[] {
    // A vLLM rank writes to all of our ranks as soon as one of them has registered.
    const othersRegister =
      !this.#engine.features.has(PUSH_CONTROL) && this.#options.tpSize > this.#engine.address.tpSize;
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

  #error(error: unknown, type: FailureType): ReceiveError {
    return ReceiveError.from(error, "KV_TRANSFER_FAILED", type, this.#request.signal);
  }
}

/**
 * Plans the receive pass of a request whose blocks a producer will write. An incompatible pair is refused here, before a block is
 * registered. Errors: `ReceiveError` with `transfer_setup_failed` and `KV_PLAN_UNSUPPORTED`, `KV_BLOCKS_MISMATCH` or those of
 * `planRequest`.
 */
export function planReceive(
  engine: RemoteEngine,
  order: RegistrationOrder,
  { groups, tpSize }: ReceivingEngine,
): RequestPlan {
  try {
    if (!engine.features.has(PUSH_CONTROL)) assertVllmCanWrite(engine, order);
    return planRequest(engine.plan, {
      localBlockIds: order.localBlockIds,
      // Only the number of the producer's blocks matters here: it determines where ours begin.
      remoteBlockIds: order.remoteBlockIds ?? placeholderBlocks(order, engine, groups),
      numTokens: order.numTokens,
      localComputedBlocks: order.localComputedBlocks,
    });
  } catch (error) {
    throw new ReceiveError(
      KvError.from(error, "KV_TRANSFER_INVALID", `request ${order.requestId} on ${tpSize} ranks`),
      "transfer_setup_failed",
    );
  }
}

/** Refuses what a vLLM 0.33 producer would write wrongly. Errors: `KV_PLAN_UNSUPPORTED`, `KV_BLOCKS_MISMATCH`. */
function assertVllmCanWrite({ plan, address }: RemoteEngine, order: RegistrationOrder): void {
  if (plan.local.kernelBlockSize !== plan.remote.kernelBlockSize) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `engine ${address.engineId} has kernel blocks of ${plan.remote.kernelBlockSize} tokens and this one of ${plan.local.kernelBlockSize}: a vLLM 0.33 prefill worker cannot push to such blocks`,
      { hint: "use equal block sizes, or pull" },
    );
  }
  const empty = order.localBlockIds.findIndex((ids) => ids.length === 0);
  if (empty >= 0) {
    throw new KvError(
      "KV_BLOCKS_MISMATCH",
      `request ${order.requestId} wants no block of KV cache group ${empty}: a vLLM 0.33 prefill worker reads an empty group as all of its blocks`,
    );
  }
}

/**
 * Stands in for the producer's block ids before the producer has answered: as many for each group as it will transfer. It clips windows
 * and states as this engine does, in blocks of its own size.
 */
function placeholderBlocks(
  { numTokens, localBlockIds }: RegistrationOrder,
  { plan }: RemoteEngine,
  groups: KvCacheConfig["groups"],
): BlockIds {
  return localBlockIds.map((local, index) => {
    const group = groups[index];
    const { extent, remoteBlockTokens } = plan.groupPlans[index] ?? {};
    // A group without tokens has as many blocks at the producer as are wanted here.
    if (group === undefined || remoteBlockTokens === undefined || extent === "state" || extent === "whole") {
      return local.map((_, i) => i);
    }
    const whole = Array.from({ length: Math.ceil(numTokens / remoteBlockTokens) }, (_, i) => i);
    const clipped = exchangedBlocks(
      [whole],
      { groups: [{ ...group, blockSize: remoteBlockTokens }], blockSize: remoteBlockTokens },
      { numTokens },
    );
    return (clipped[0] ?? []).map((_, i) => i);
  });
}
