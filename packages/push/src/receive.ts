import {
  type OpenEngine,
  type PendingReceive,
  planPrefillEngine,
  ReceiveError,
  type RemoteEngine,
  type RemoteEngines,
  traced,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { type BlockIds, type Clock, type KvCacheConfig, KvError, type Timer } from "@kv/interface";
import { exchangedBlocks, planRequest, type RequestPlan } from "@kv/plan";
import { checkedSide, vllmLimitOf } from "@kv/plan/vllm";
import {
  baseRequestId,
  encodeRegistration,
  encodeWithdrawal,
  PUSH_CONTROL,
  type Registrant,
} from "@kv/protocol";
import { isSameAgent, type ProducerLiveness } from "./producer-liveness.js";
import type { RegistrationOrder } from "./step-metadata.js";

export interface ReceivePushOptions {
  readonly context: WorkerContext;
  readonly engines: Pick<RemoteEngines, "acquire" | "drop">;
  readonly liveness: ProducerLiveness;
  registrant(): Registrant;
}

/** A withdrawal is repeated until it is answered. */
const WITHDRAWAL_REPEAT_MS = 1000;
/** A failed request waits this long before its blocks are reported as at risk. */
const REPORT_GRACE_MS = 500;
/** Done notifications kept before a step names their request: another rank registered. */
const MAX_EARLY = 4096;
/** Agents choose their names, so their number per registration is limited. */
const MAX_AGENTS = 4096;
/** Older early notifications belong to another use of the id. */
const EARLY_MS = 10_000;

/**
 * Registers the blocks, waits for each P rank's done notification, and runs the receive pass.
 * Settles when no WRITE can arrive. After `decoderBlocksTtlMs`, or when abandoned, one still may.
 * A vLLM P neither compares prompts nor says that it will not write.
 * @throws `ReceiveError`.
 */
export async function receivePush(
  receive: PendingReceive<RegistrationOrder>,
  replies: RegistrationReplies,
  options: ReceivePushOptions,
): Promise<void> {
  const { requestId, remote } = receive.order;
  const isNamed =
    remote.transferId !== undefined || baseRequestId(requestId) === baseRequestId(remote.requestId);
  const { engine, release } = await receive.open(
    options.engines,
    "push_reg_handshake_failed",
    isNamed,
  );
  receive.engine = engine;
  try {
    const isOwn = engine.features.has(PUSH_CONTROL);
    // A vLLM P that has not answered may still compute; one that has answered writes now or never.
    if (!isOwn && receive.order.remoteBlockIds === undefined)
      receive.allow(options.context.settings.registrationTimeoutMs);
    await new PushReceive(receive, replies, engine, options).run();
    receive.isVerified = isOwn;
  } finally {
    release();
  }
}

class PushReceive {
  readonly #receive: PendingReceive<RegistrationOrder>;
  readonly #replies: RegistrationReplies;
  readonly #engine: RemoteEngine;
  readonly #options: ReceivePushOptions;
  readonly #agents: readonly string[];
  /** An `@kv` P says everything with the registration's secret. */
  readonly #isOwn: boolean;
  readonly #unregistered = new Set<string>();
  #registeredMs = 0;

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
    this.#isOwn = engine.features.has(PUSH_CONTROL);
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

  /** Undefined if every rank has written its share. */
  async #registerAndWait(): Promise<ReceiveError | undefined> {
    const receive = this.#receive;
    const { order, signal } = receive;
    if (signal.aborted) throw receive.error(signal.reason, "push_reg_handshake_failed");
    const aborted = new Promise<void>((resolve) => {
      signal.addEventListener("abort", () => resolve());
    });
    this.#registeredMs = this.#options.context.clock.now();
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

  #hasWritten(agent: string): boolean {
    const { done, written } = this.#replies;
    return (this.#isOwn ? written : done).has(agent);
  }

  #hasFailed(agent: string): boolean {
    return !this.#isOwn && this.#replies.failed.has(agent);
  }

  /** After a failed send the rank is `unregistered`, and the engine is dropped. */
  #register(agent: string): Promise<unknown> {
    const { order } = this.#receive;
    const { context, engines, registrant } = this.#options;
    const { notifications, metrics, log, tracer } = context;
    const payload = encodeRegistration(order, registrant(), this.#isOwn);
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
   * Withdraws the registration, and waits until each rank that may write has replied, P's process
   * is gone, or waiting is useless. After `REPORT_GRACE_MS`, reports the blocks as at risk.
   */
  async #waitUntilSafe(failure: ReceiveError): Promise<void> {
    const { order } = this.#receive;
    const { context, liveness, registrant } = this.#options;
    const { clock, settings } = context;
    const { ended } = this.#replies;
    const startedMs = clock.now();
    const isLate = !this.#isOwn && order.remoteBlockIds !== undefined;
    const giveUpMs = (isLate ? this.#registeredMs : startedMs) + settings.decoderBlocksTtlMs;
    const reportMs = startedMs + REPORT_GRACE_MS;
    const mayWrite = this.#mayWrite();
    const silent = () =>
      mayWrite.filter(
        (agent) =>
          !this.#replies.abandoned &&
          !this.#hasWritten(agent) &&
          !this.#hasFailed(agent) &&
          !ended.has(agent),
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
      // A vLLM restart cannot be detected: it sends no incarnation.
      if (this.#engine.incarnation === undefined || round === 0) continue;
      const reply = await liveness.probe(order);
      if (reply !== undefined && !isSameAgent(this.#engine, reply)) return;
    }
  }

  /** Ranks that may write to the registered blocks. */
  #mayWrite(): readonly string[] {
    // A vLLM rank writes to all of D's ranks once one has registered.
    const { tpSize } = this.#options.context.options.engine;
    if (!this.#isOwn && tpSize > this.#engine.address.tpSize) return this.#agents;
    return this.#agents.filter((agent) => !this.#unregistered.has(agent));
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
 * Withdraws the order's blocks. A lost message is repeated, or P frees the blocks when the lease
 * ends. vLLM's protocol has no withdrawal.
 */
export function withdrawRegistration(
  { notifications, log }: Pick<WorkerContext, "notifications" | "log">,
  order: RegistrationOrder,
  registrant: Registrant,
  engine: OpenEngine,
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
 * Plans the receive pass.
 * @throws `ReceiveError` with `transfer_setup_failed` and `KV_BLOCKS_MISMATCH` or those of
 * `planRequest`.
 */
export function planReceive(
  engine: RemoteEngine,
  order: RegistrationOrder,
  { caches, options }: Pick<WorkerContext, "caches" | "options">,
): RequestPlan {
  try {
    if (!engine.features.has(PUSH_CONTROL)) requireNoEmptyGroup(order);
    return planRequest(engine.plan, {
      localBlockIds: order.localBlockIds,
      // Only their number matters: it fixes where D's blocks begin.
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

/** `written` carries the registration's secret; the others prove nothing. */
type Reply = "done" | "failed" | "written";

/** P's replies by registration. */
export class PushReplies {
  readonly #clock: Clock;
  readonly #open = new Map<string, RegistrationReplies>();
  readonly #early = new Map<string, { readonly agents: Set<string>; readonly sinceMs: number }>();

  constructor({ clock }: { readonly clock: Clock }) {
    this.#clock = clock;
  }

  /** Includes done notifications of a moment ago. */
  open(wireId: string): RegistrationReplies {
    const early = this.#early.get(wireId);
    this.#early.delete(wireId);
    const isFresh = early !== undefined && this.#clock.now() - early.sinceMs < EARLY_MS;
    const replies = new RegistrationReplies(isFresh ? early.agents : []);
    this.#open.set(wireId, replies);
    return replies;
  }

  close(wireId: string): void {
    this.#open.delete(wireId);
  }

  /** False if no such registration is open; `done` is then kept for a moment. */
  add(reply: Reply, wireId: string, agent: string): boolean {
    const replies = this.#open.get(wireId);
    if (replies !== undefined) {
      if (replies[reply].size < MAX_AGENTS) replies[reply].add(agent);
      replies.wake();
    } else if (reply === "done") this.#addEarly(wireId, agent);
    return replies !== undefined;
  }

  /** With the registration's secret: the rank does not write, or has stopped. */
  ended(wireId: string, agent: string, error: KvError): void {
    const replies = this.#open.get(wireId);
    if (replies === undefined) return;
    if (replies.ended.size < MAX_AGENTS || replies.ended.has(agent))
      replies.ended.set(agent, error);
    replies.wake();
  }

  abandonAll(): void {
    for (const replies of this.#open.values()) {
      replies.abandoned = true;
      replies.wake();
    }
  }

  #addEarly(wireId: string, agent: string): void {
    const early = this.#early.get(wireId) ?? {
      agents: new Set<string>(),
      sinceMs: this.#clock.now(),
    };
    if (early.agents.size < MAX_AGENTS) early.agents.add(agent);
    this.#early.set(wireId, early);
    const [oldest] = this.#early.keys();
    if (this.#early.size > MAX_EARLY && oldest !== undefined) this.#early.delete(oldest);
  }
}

/** P's replies to one registration, by agent. */
export class RegistrationReplies implements Record<Reply, Set<string>> {
  readonly done: Set<string>;
  readonly failed = new Set<string>();
  readonly written = new Set<string>();
  readonly ended = new Map<string, KvError>();
  abandoned = false;
  #resolve: () => void = () => {};
  #next = this.#nextWake();

  constructor(early: Iterable<string>) {
    this.done = new Set(early);
  }

  next(): Promise<void> {
    return this.#next;
  }

  wake(): void {
    this.#resolve();
    this.#next = this.#nextWake();
  }

  #nextWake(): Promise<void> {
    return new Promise((resolve) => {
      this.#resolve = resolve;
    });
  }
}

/**
 * One rank of D's plan for the P that writes. Refuses what a vLLM 0.33 P would refuse in silence or
 * write wrongly: nothing would tell D.
 * @throws `KV_PLAN_UNSUPPORTED`; those of `planPrefillEngine`.
 */
export function planProducer(
  context: WorkerContext,
  { engineId }: OpenEngine["address"],
  answer: Parameters<typeof planPrefillEngine>[1],
): ReturnType<typeof planPrefillEngine> {
  const planned = planPrefillEngine(context, answer, { preparesLists: false });
  if (answer.features.has(PUSH_CONTROL)) return planned;
  const { plan } = planned;
  const [mine, theirs] = [plan.local.kernelBlockSize, plan.remote.kernelBlockSize];
  if (mine !== theirs) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `engine ${engineId} has kernel blocks of ${theirs} tokens and this one of ${mine}: a vLLM 0.33 prefill worker cannot push to such blocks`,
      { hint: "use equal block sizes, or pull" },
    );
  }
  const limit = vllmLimitOf(
    {
      local: checkedSide(plan.remote),
      remote: checkedSide(plan.local),
      model: context.model,
      hasStates: plan.local.stateSpace !== undefined,
      mode: "push",
      checking: "prefill",
    },
    "0.33.0",
  );
  if (limit === undefined) return planned;
  throw new KvError("KV_PLAN_UNSUPPORTED", `engine ${engineId}: ${limit.text}`, {
    hint: limit.fix,
    details: { factor: limit.factor, local: limit.decode, remote: limit.prefill },
  });
}

/** @throws `KV_BLOCKS_MISMATCH`. */
function requireNoEmptyGroup({ requestId, localBlockIds }: RegistrationOrder): void {
  const empty = localBlockIds.findIndex((ids) => ids.length === 0);
  if (empty < 0) return;
  throw new KvError(
    "KV_BLOCKS_MISMATCH",
    `request ${requestId} wants no block of KV cache group ${empty}: a vLLM 0.33 prefill worker reads an empty group as all of its blocks`,
  );
}

/** Stand in for P's block ids until it answers: as many per group as it will transfer. */
function placeholderBlocks(
  { numTokens, localBlockIds }: RegistrationOrder,
  { plan }: RemoteEngine,
  groups: KvCacheConfig["groups"],
): BlockIds {
  const { dcpSize = 1 } = plan.remote;
  return localBlockIds.map((local, index) => {
    const group = groups[index];
    const { extent, remoteBlockTokens } = plan.groupPlans[index] ?? {};
    // A group without tokens has as many blocks at P as are wanted here.
    if (
      group === undefined ||
      remoteBlockTokens === undefined ||
      extent === "state" ||
      extent === "whole"
    ) {
      return local.map((_, i) => i);
    }
    const whole = Array.from(
      { length: Math.ceil(numTokens / (remoteBlockTokens * dcpSize)) },
      (_, i) => i,
    );
    const clipped = exchangedBlocks(
      [whole],
      { groups: [{ ...group, blockSize: remoteBlockTokens }], blockSize: remoteBlockTokens },
      { numTokens, dcpSize },
    );
    return (clipped[0] ?? []).map((_, i) => i);
  });
}
