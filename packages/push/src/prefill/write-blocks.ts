import {
  type LeaseOrder,
  type ListPair,
  type RemoteEngines,
  rankKey,
  TaskTracker,
  traced,
  transferAll,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { type DescriptorPairs, type DescriptorRuns, KvError, type Span } from "@kv/interface";
import { type EngineTransferPlan, planRequest, type RequestRead, swapDirection } from "@kv/plan";
import {
  encodeNotification,
  encodeRegistrationEnded,
  encodeRegistrationWritten,
  type Registration,
} from "@kv/protocol";
import type { ConsumerEngine, ConsumerTarget } from "./consumer-engine.js";

/** One WRITE of all or some of a request's blocks. */
export interface BlockWrite {
  readonly registration: Registration;
  readonly ranks: readonly number[];
  /** P's blocks per group, and their tokens. */
  readonly order: Pick<LeaseOrder, "requestId" | "promptBlockIds" | "numTokens" | "traceparent">;
  /** @default all regions */
  readonly includesRegion?: ((region: string) => boolean) | undefined;
  /**
   * Notifies D's ranks.
   * @default true
   */
  readonly last?: boolean | undefined;
}

export interface DispatchedWrite extends BlockWrite {
  readonly controller: AbortController;
  /** An end because of D's withdrawal is not a failure. */
  withdrawn?: boolean | undefined;
}

/** The transport runs them one after another anyway. */
const WRITES_PER_CONSUMER = 8;

/**
 * From this `NIXL_CONNECTOR_VERSION` on, vLLM's D is told in vllm#50754's form. No release has it;
 * 0.33 has 15.
 */
const PUSH_FAILURE_VERSION = 16;

interface ConsumerQueue {
  running: number;
  readonly waiting: (() => Promise<void>)[];
}

/**
 * Runs a P rank's writes. Each D has its own queue and slots, so a slow one does not delay others.
 * A write has a deadline, and goes to the process that registered.
 */
export class WriteDispatcher {
  readonly #context: WorkerContext;
  readonly #consumers: RemoteEngines<ConsumerEngine>;
  readonly #queues = new Map<string, ConsumerQueue>();
  readonly #running = new TaskTracker();
  #waiting = 0;

  constructor(context: WorkerContext, consumers: RemoteEngines<ConsumerEngine>) {
    this.#context = context;
    this.#consumers = consumers;
  }

  /**
   * Resolves when no transfer touches memory, with the error of a failed one. Logs and counts
   * failures under vLLM's types, except withdrawals.
   */
  write(write: DispatchedWrite): Promise<KvError | undefined> {
    // A registration names its own engine: the address keeps it from another's slots.
    const { engineId, host, port } = write.registration;
    const consumer = JSON.stringify([engineId, host, port]);
    const queue = this.#queues.get(consumer) ?? { running: 0, waiting: [] };
    this.#queues.set(consumer, queue);
    this.#waiting += 1;
    const { order } = write;
    const span = this.#context.tracer?.start("kv.push", {
      parent: order.traceparent,
      attributes: { "kv.request_id": order.requestId, "kv.remote_engine_id": engineId },
    });
    return new Promise((resolve) => {
      queue.waiting.push(() => this.#run(write, span).then(resolve));
      this.#startNext(consumer, queue);
    });
  }

  /** vLLM up to 0.33 does not understand that a registration has ended. */
  canTell({ own }: Registration): boolean {
    const { connectorVersion } = this.#context.options.engine.model;
    return own !== undefined || connectorVersion >= PUSH_FAILURE_VERSION;
  }

  /**
   * Sends `push_ended`, or `PUSH_FAIL` to a vLLM D, which repeats its withdrawal if the notice is
   * lost. Never rejects.
   */
  async tellEnded(registration: Registration, { code, message }: KvError): Promise<void> {
    const { local, notifications, log } = this.#context;
    const { own, wireId } = registration;
    const failed = (reason: unknown) =>
      log.debug("push-ended-notice-failed", {
        request: wireId,
        rank: own?.rank,
        error: String(reason),
      });
    const payload =
      own === undefined
        ? encodeNotification({ kind: "push-failure", requestId: wireId, readers: local.tpSize })
        : encodeRegistrationEnded({ ...own, wireId, code, message });
    try {
      const consumer = consumerOf(registration);
      const { engine, release } = await this.#consumers.reach(consumer, undefined, false);
      // All ranks of a vLLM D send the same registration.
      const only = own && rankKey({ tpRank: own.rank });
      const told = [...engine.agents].filter(([rank]) => only === undefined || rank === only);
      await Promise.all(told.map(([, agent]) => notifications.send(agent, payload, failed)));
      release();
    } catch (error) {
      failed(error);
    }
  }

  get size(): number {
    return this.#running.size + this.#waiting;
  }

  /** Consumers with writes that run or wait. */
  get queues(): number {
    return this.#queues.size;
  }

  idle(): Promise<void> {
    return this.#running.idle();
  }

  #startNext(consumer: string, queue: ConsumerQueue): void {
    while (queue.running < WRITES_PER_CONSUMER) {
      const start = queue.waiting.shift();
      if (start === undefined) break;
      this.#waiting -= 1;
      queue.running += 1;
      this.#running.track(
        start().finally(() => {
          queue.running -= 1;
          this.#startNext(consumer, queue);
        }),
      );
    }
    if (queue.running === 0 && queue.waiting.length === 0) this.#queues.delete(consumer);
  }

  async #run(write: DispatchedWrite, span: Span | undefined): Promise<KvError | undefined> {
    const { clock, settings } = this.#context;
    const writeTimeoutMs = settings.requestTimeoutMs;
    const { registration, controller, order } = write;
    const parent = span?.traceparent;
    span?.event("started");
    const { signal } = controller;
    const timer = clock.setTimer(
      () => controller.abort(timedOut(registration, writeTimeoutMs)),
      writeTimeoutMs,
    );
    let reference: Awaited<ReturnType<RemoteEngines<ConsumerEngine>["acquire"]>> | undefined;
    try {
      signal.throwIfAborted();
      reference = await this.#consumers.acquire(consumerOf(registration, parent), signal);
      const traced = { ...write, order: { ...order, traceparent: parent } };
      await writeBlocks(reference.engine, traced, signal, this.#context);
      span?.end();
      return undefined;
    } catch (thrown) {
      span?.end(thrown);
      return this.#failed(write, reference?.engine, thrown);
    } finally {
      timer.cancel();
      reference?.release();
    }
  }

  #failed(write: DispatchedWrite, consumer: ConsumerEngine | undefined, thrown: unknown): KvError {
    const { log, metrics } = this.#context;
    const { requestId } = write.order;
    const { engineId } = write.registration;
    const error = KvError.from(thrown, "KV_TRANSFER_FAILED", `the WRITE of request ${requestId}`);
    const failureType = consumer === undefined ? "push_handshake_failed" : "transfer_failed";
    if (write.withdrawn !== true) {
      if (consumer !== undefined) metrics.transferFailed();
      log.warn(failureType, { requestId, engineId, code: error.code, error: error.message });
    }
    if (consumer !== undefined) this.#consumers.dropIfLost(consumer, error);
    return error;
  }
}

function timedOut({ wireId, engineId }: Registration, timeoutMs: number): KvError {
  return new KvError(
    "KV_TRANSFER_TIMEOUT",
    `the KV of request ${wireId} was not written to engine ${engineId} within ${timeoutMs} ms`,
    { details: { engineId, timeoutMs } },
  );
}

/** A restarted D keeps its engine id; vLLM's names no process. */
function consumerOf(
  { engineId, host, port, tpSize, own, wireId }: Registration,
  traceparent?: string | undefined,
) {
  const { registrationGeneration, dcpSize = 1 } = own ?? {};
  return {
    engineId,
    host,
    port,
    tpSize,
    dcpSize,
    ppSize: 1,
    registrationGeneration,
    requestId: wireId,
    lease: own && { incarnation: own.incarnation },
    traceparent,
  };
}

interface PlannedWrite {
  readonly lists: ListPair;
  readonly descriptors: DescriptorPairs | DescriptorRuns;
}

/**
 * Writes blocks where D registered them. The last write notifies each rank after all of its bytes:
 * with the WRITE if that is one NIXL request, else when all are done, because NIXL does not order
 * requests. Settles when no transfer touches memory.
 * @throws The first failure; `KV_REQUEST_INVALID` for a rank that this one does not serve; those of
 * the plan; the signal's reason.
 */
export async function writeBlocks(
  consumer: ConsumerEngine,
  write: BlockWrite,
  signal: AbortSignal,
  context: Pick<WorkerContext, "agent" | "local" | "log" | "metrics" | "notifications" | "tracer">,
): Promise<void> {
  const { registration, ranks, last = true } = write;
  const { tracer, local, log, metrics, notifications } = context;
  const notification = writtenNotification(registration, local.tpSize);
  const targets = ranks.map((rank) => targetOf(consumer, rank));
  // All ranks are planned first: if one cannot be, no byte is written.
  const parent = write.order.traceparent;
  const planned = traced(tracer, "kv.plan", { parent }, () =>
    targets.map((target) => ({ target, writes: planWrites(target, write, local.tpRank) })),
  );
  signal.throwIfAborted();

  await transferAll(context, { signal, parent }, (transfers) =>
    Promise.all(
      planned.map(async ({ target, writes }) => {
        const notifiesWithWrite = last && writes.length === 1;
        await Promise.all(
          writes.map(({ lists, descriptors }) =>
            transfers.start({
              operation: "WRITE",
              ...lists,
              ...descriptors,
              ...(notifiesWithWrite ? { notification } : {}),
            }),
          ),
        );
        if (!last || notifiesWithWrite || transfers.hasFailed) return;
        const { agent } = target;
        const attributes = { "kv.remote_agent": agent };
        await traced(tracer, "kv.notify", { parent, attributes }, (span) =>
          notifications.send(agent, notification, (error) => {
            metrics.notificationFailed();
            span?.end(error);
            log.warn("notification_failed", { agent, error: String(error) });
            transfers.fail(error);
          }),
        );
      }),
    ),
  ).catch((error: unknown) => {
    throw signal.aborted ? signal.reason : error;
  });
}

/** `"{D's id}:{P's TP size}"`, with the registration's secret for `@kv`. */
function writtenNotification({ wireId, own }: Registration, readers: number): Uint8Array {
  if (own === undefined) return encodeNotification({ kind: "done", requestId: wireId, readers });
  return encodeRegistrationWritten({ wireId, readers, secret: own.secret });
}

function targetOf({ targets, address }: ConsumerEngine, rank: number): ConsumerTarget {
  const target = targets.get(rank);
  if (target !== undefined) return target;
  throw new KvError(
    "KV_REQUEST_INVALID",
    `this rank does not serve rank ${rank} of engine ${address.engineId}, only ${[...targets.keys()].join(", ")}`,
  );
}

/**
 * One write per pair of memory types.
 * @throws The errors of `planRequest`.
 */
function planWrites(
  { plan, lists }: ConsumerTarget,
  write: BlockWrite,
  tpRank: number,
): PlannedWrite[] {
  const { order, registration, includesRegion = () => true } = write;
  const { own, blockIds } = registration;
  const { reads } = planRequest(plan, {
    localBlockIds: blockIds,
    remoteBlockIds: order.promptBlockIds,
    numTokens: own?.numTokens ?? order.numTokens,
    ...(own === undefined ? {} : { localComputedBlocks: own.computedBlocks }),
  });
  return reads.flatMap((read) => {
    const prepared = lists[read.listIndex];
    if (read.remoteRank !== tpRank || prepared === undefined) return [];
    // D's plan reads from here, so its local side is remote.
    const descriptors = swapDirection(descriptorsInRegions(plan, read, includesRegion));
    const { length } = descriptors.runs ?? descriptors.localIds;
    return length === 0 ? [] : [{ lists: prepared, descriptors }];
  });
}

/** Descriptor ids `from` (included) to `until` (excluded). */
interface RegionRange {
  readonly from: number;
  readonly until: number;
  readonly region: string;
}

function descriptorsInRegions(
  plan: EngineTransferPlan,
  read: RequestRead,
  includes: (region: string) => boolean,
): DescriptorPairs | DescriptorRuns {
  const ranges = rangesOf(plan, read);
  const wanted = ranges.filter(({ region }) => includes(region));
  if (wanted.length === ranges.length) return read.descriptors;
  const { localIds, remoteIds } = read;
  const local = new Int32Array(localIds.length);
  const remote = new Int32Array(localIds.length);
  let count = 0;
  // Ids are ordered by segment, so the next id mostly has the same range.
  let range: RegionRange | undefined;
  for (const [i, id] of remoteIds.entries()) {
    const isInside = ({ from, until }: RegionRange) => id >= from && id < until;
    if (range === undefined || !isInside(range)) range = wanted.find(isInside);
    if (range === undefined) continue;
    local[count] = localIds[i] ?? 0;
    remote[count] = id;
    count += 1;
  }
  return { localIds: local.subarray(0, count), remoteIds: remote.subarray(0, count) };
}

const rangesByPlan = new WeakMap<EngineTransferPlan, Map<string, readonly RegionRange[]>>();

function rangesOf(
  plan: EngineTransferPlan,
  { sourceIndex, listIndex }: RequestRead,
): readonly RegionRange[] {
  const known = rangesByPlan.get(plan) ?? new Map<string, readonly RegionRange[]>();
  rangesByPlan.set(plan, known);
  const key = `${sourceIndex} ${listIndex}`;
  const ranges =
    known.get(key) ??
    plan.segments.flatMap(({ list, remoteRegion }, index): RegionRange[] => {
      const { offset, count } = plan.sources[sourceIndex]?.remoteIndexing[index] ?? {};
      if (list !== listIndex || offset === undefined || !count) return [];
      const region = plan.remote.regions[remoteRegion]?.name ?? "";
      return [{ from: offset, until: offset + count, region }];
    });
  known.set(key, ranges);
  return ranges;
}
