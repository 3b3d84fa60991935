import {
  type FailureType,
  type HeartbeatSender,
  inSpan,
  isPeerLost,
  type PendingReceive,
  type RankKey,
  ReceiveError,
  ReceivePass,
  type RemoteEngine,
  type RemoteEngines,
  rankKey,
  transferAll,
  unreachablePeer,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { planRequest, type RequestPlan } from "@kv/plan";
import type { BlockReleases } from "./block-releases.js";
import { leaseDeadlineMs } from "./lease-deadline.js";
import type { ReceiveOrder } from "./step-metadata.js";

/** The parts that D's receives share. */
export interface ReceiverOptions {
  readonly context: WorkerContext;
  readonly engines: RemoteEngines;
  readonly heartbeats: Pick<HeartbeatSender, "takenAtMs">;
  readonly releases: Pick<BlockReleases, "hold">;
}

/**
 * Receives one request's KV from P's blocks into D's: plan, READs, a query whether P held the blocks until the end and computed the same prompt, and the
 * receive pass. `BlockReleases` notifies P afterwards.
 */
export class PullReceiver {
  readonly #context: WorkerContext;
  readonly #options: ReceiverOptions;
  readonly #pass: ReceivePass;

  constructor(options: ReceiverOptions) {
    this.#context = options.context;
    this.#options = options;
    this.#pass = new ReceivePass(options.context.caches);
  }

  /** Receives a request. Settles when no transfer of it can touch memory any more. Errors: `ReceiveError`. */
  async receive(receive: PendingReceive<ReceiveOrder>): Promise<void> {
    const { order, signal } = receive;
    const { engines, releases } = this.#options;
    const reference = await engines.acquire(order.remote, signal).catch((error: unknown) => {
      throw ReceiveError.from(unreachablePeer(error), "KV_HANDSHAKE_REFUSED", "handshake_failed", signal);
    });
    releases.hold(order.remote, reference);
    await this.#receiveFrom(reference.engine, receive);
  }

  async #receiveFrom(engine: RemoteEngine, receive: PendingReceive<ReceiveOrder>): Promise<void> {
    const { order, signal } = receive;
    const { clock, tracer } = this.#context;
    const parent = order.remote.traceparent;
    const plan = inSpan(tracer?.start("kv.plan", { parent }), () => planReceive(engine, order, signal));
    const canAsk = engine.incarnation !== undefined;
    if (!canAsk && clock.now() >= this.#deadlineMs(order, engine)) throw this.#expired(order, engine);
    await this.#readAll(engine, plan, order, signal);
    if (canAsk) receive.isVerified = await this.#requireLease(order, engine, signal);
    else if (clock.now() > this.#deadlineMs(order, engine)) throw this.#expired(order, engine);
    try {
      if (plan.receivePass !== undefined)
        inSpan(tracer?.start("kv.receive_pass", { parent }), () => this.#pass.apply(engine, plan));
    } catch (error) {
      throw ReceiveError.from(error, "KV_TRANSFER_FAILED", "transfer_exception", signal);
    }
  }

  /** Posts a READ per source, waits until all have ended and released memory, and throws the first failure. */
  async #readAll(
    engine: RemoteEngine,
    plan: RequestPlan,
    order: ReceiveOrder,
    signal: AbortSignal,
  ): Promise<void> {
    const { log, metrics } = this.#context;
    const failed = (error: unknown, failureType: FailureType, remoteRank: RankKey): ReceiveError => {
      const failure = ReceiveError.from(error, "KV_TRANSFER_FAILED", failureType, signal);
      if (signal.aborted) return failure;
      const { message } = failure.error;
      const { engineId } = order.remote;
      metrics.transferFailed();
      log.warn("transfer_failed", { requestId: order.requestId, engineId, remoteRank, error: message });
      if (isPeerLost(failure.error)) this.#options.engines.drop(engine, message);
      return failure;
    };
    await transferAll(this.#context, { signal, parent: order.remote.traceparent }, async (transfers) => {
      const reads = plan.reads.map(
        async ({ sourceIndex, listIndex, remoteRank, remotePpRank, descriptors }) => {
          if (transfers.hasFailed) return;
          const rank = rankKey({ ppRank: remotePpRank, tpRank: remoteRank });
          const lists = engine.sources[sourceIndex]?.lists[listIndex];
          if (lists === undefined) {
            const why = `the plan reads from list ${listIndex} of source ${sourceIndex}, which was not prepared`;
            const error = new KvError("KV_INTERNAL", `request ${order.requestId}: ${why}`);
            transfers.fail(failed(error, "transfer_setup_failed", rank));
            return;
          }
          await transfers.start({ operation: "READ", ...lists, ...descriptors }, (error, isStarted) =>
            failed(error, isStarted ? "transfer_failed" : "transfer_setup_failed", rank),
          );
        },
      );
      await Promise.all(reads);
    });
  }

  /**
   * Checks that P held the blocks until the READs had ended. Returns whether P has compared the prompts: one of an earlier version does not. Errors:
   * `ReceiveError`.
   */
  async #requireLease(order: ReceiveOrder, engine: RemoteEngine, signal: AbortSignal): Promise<boolean> {
    const { engineId, requestId } = order.remote;
    const { held, incarnation, prompt } = await this.#options.engines
      .queryLease(order.remote, signal)
      .catch((error: unknown) => {
        this.#context.log.warn("lease_query_failed", { requestId, engineId, error: String(error) });
        const unreachable = unreachablePeer(error);
        throw ReceiveError.from(unreachable, "KV_SIDE_CHANNEL_UNREACHABLE", "lease_query_failed", signal);
      });
    if (prompt === "differs") throw new ReceiveError(promptMismatch(order), "prompt_mismatch");
    if (held && incarnation === engine.incarnation) return prompt === "same";
    const error = new KvError(
      "KV_LEASE_EXPIRED",
      `engine ${engineId} did not keep the blocks of request ${requestId} until they were read: the bytes that were read are not used`,
      {
        hint: "the lease ended, another reader was done with the request, or the prefill worker was restarted; send the prompt to it again",
        details: { engineId, requestId, incarnation: engine.incarnation, answeredBy: incarnation },
      },
    );
    throw ReceiveError.from(error, "KV_LEASE_EXPIRED", "lease_expired", signal);
  }

  #deadlineMs(order: ReceiveOrder, engine: RemoteEngine): number {
    const { leaseMs, extensionMs, leaseMarginMs } = this.#context.settings;
    return leaseDeadlineMs({
      expirySeconds: order.remote.expirySeconds,
      clock: engine.clock,
      seenAtMs: order.seenAtMs,
      leaseMs,
      extensionMs,
      marginMs: leaseMarginMs,
      heartbeatsAtMs: this.#options.heartbeats.takenAtMs(order.remote),
    });
  }

  #expired(order: ReceiveOrder, engine: RemoteEngine): ReceiveError {
    const { engineId, requestId } = order.remote;
    const lateMs = this.#context.clock.now() - this.#deadlineMs(order, engine);
    const error = new KvError(
      "KV_LEASE_EXPIRED",
      `engine ${engineId} was guaranteed to hold the blocks of request ${requestId} only until ${Math.ceil(lateMs)} ms ago: its READ is not used`,
      {
        hint: "raise kv_lease_duration on both sides, or give decode workers more blocks",
        details: { lateMs },
      },
    );
    return new ReceiveError(error, "lease_expired");
  }
}

function promptMismatch({ requestId, remote }: ReceiveOrder): KvError {
  const { engineId, requestId: remoteRequestId, prompt } = remote;
  const what =
    prompt === undefined
      ? "the engine of this request handed its connector no token ids to compare"
      : `its first ${prompt.numTokens} tokens, or what else decides its KV, differ`;
  return new KvError(
    "KV_PROMPT_MISMATCH",
    `request ${requestId} is not the prompt whose KV engine ${engineId} keeps for request ${remoteRequestId}: ${what}; the bytes that were read are not used`,
    {
      hint: "send the decode worker the prompt of the prefill request, with the same model, LoRA adapter, cache salt and images",
      details: { engineId, requestId: remoteRequestId, numTokens: prompt?.numTokens },
    },
  );
}

function planReceive(engine: RemoteEngine, order: ReceiveOrder, signal: AbortSignal): RequestPlan {
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
    throw ReceiveError.from(error, "KV_TRANSFER_INVALID", "transfer_setup_failed", signal);
  }
}
