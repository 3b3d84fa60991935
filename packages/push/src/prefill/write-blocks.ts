import {
  type LeaseOrder,
  type ListPair,
  type RemoteEngines,
  traced,
  transferAll,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { type DescriptorPairs, type DescriptorRuns, KvError, type Span } from "@kv/interface";
import { type EngineTransferPlan, planRequest, type RequestRead, swapDirection } from "@kv/plan";
import { encodeNotification, encodeRegistrationWritten, type Registration } from "@kv/protocol";
import type { ConsumerEngine, ConsumerTarget } from "./consumer-engine.js";

/**
 * The parts of a worker that write. `local` has the tensor-parallel size, the `n` of the done
 * notification `"{id}:{n}"`.
 */
export type WriteContext = Pick<WorkerContext, "agent" | "log" | "metrics" | "tracer"> & {
  readonly notifications: Pick<WorkerContext["notifications"], "send">;
  readonly local: Pick<WorkerContext["local"], "tpRank" | "tpSize">;
};

/** One WRITE of a request's blocks, or of a part of them. */
export interface BlockWrite {
  readonly registration: Registration;
  readonly ranks: readonly number[];
  /** The producer's blocks, per group, and the number of tokens in them. */
  readonly order: Pick<LeaseOrder, "requestId" | "promptBlockIds" | "numTokens" | "traceparent">;
  /** True for the regions that are written. Default: all. */
  readonly includesRegion?: ((region: string) => boolean) | undefined;
  /** This write completes the request: the consumer's ranks are notified. Default true. */
  readonly last?: boolean | undefined;
}

/** A write that the dispatcher runs or queues. */
export interface DispatchedWrite extends BlockWrite {
  /** Aborts the write. The dispatcher aborts it at the deadline. */
  readonly controller: AbortController;
  /**
   * Set when the consumer withdrew its registration. A write that ends because of it has not
   * failed.
   */
  withdrawn?: boolean | undefined;
}

/**
 * How many writes to one consumer engine run at once. The transport executes them one after another
 * anyway.
 */
const WRITES_PER_CONSUMER = 8;

interface ConsumerQueue {
  running: number;
  readonly waiting: (() => Promise<void>)[];
}

/**
 * Runs the writes of a producer rank. Each consumer engine has a queue and a number of slots of its
 * own, so a slow or dead consumer does not delay others. Each write has a deadline and goes to the
 * process that registered.
 */
export class WriteDispatcher {
  readonly #context: WorkerContext;
  readonly #consumers: RemoteEngines<ConsumerEngine>;
  readonly #queues = new Map<string, ConsumerQueue>();
  readonly #running = new Set<Promise<void>>();
  #waiting = 0;

  constructor(context: WorkerContext, consumers: RemoteEngines<ConsumerEngine>) {
    this.#context = context;
    this.#consumers = consumers;
  }

  /**
   * Writes when a slot of the consumer engine is free, in the order of the calls. Resolves when no
   * transfer of it can touch memory any more, with the error if it failed; never rejects. A failure
   * is counted and logged under vLLM's failure types, unless the registration was withdrawn.
   */
  write(write: DispatchedWrite): Promise<KvError | undefined> {
    // A registration names its engine itself: the address keeps one engine from taking the slots of
    // another.
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

  get size(): number {
    return this.#running.size + this.#waiting;
  }

  async idle(): Promise<void> {
    while (this.#running.size > 0) await Promise.all(this.#running);
  }

  #startNext(consumer: string, queue: ConsumerQueue): void {
    while (queue.running < WRITES_PER_CONSUMER) {
      const start = queue.waiting.shift();
      if (start === undefined) break;
      this.#waiting -= 1;
      queue.running += 1;
      const run = start().finally(() => {
        this.#running.delete(run);
        queue.running -= 1;
        this.#startNext(consumer, queue);
      });
      this.#running.add(run);
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

/**
 * The process that sent a registration. A restarted consumer returns under the same engine id; a
 * vLLM consumer names no process.
 */
export function consumerOf(
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
 * Writes a request's blocks into the blocks that a consumer registered. The last write sends
 * `"{the consumer's id}:{our TP size}"` to each rank after the last byte of its share: the
 * notification is attached to the WRITE if there is one NIXL request, else it is sent when all
 * requests are done, because NIXL does not order requests. Settles only when no transfer of it can
 * touch memory any more.
 * @throws The first failure; `KV_REQUEST_INVALID` for a rank that this one does not serve; those of
 * the plan; the signal's reason.
 */
export async function writeBlocks(
  consumer: ConsumerEngine,
  write: BlockWrite,
  signal: AbortSignal,
  context: WriteContext,
): Promise<void> {
  const { registration, ranks, last = true } = write;
  const { tracer, local, log, metrics, notifications } = context;
  const notification = writtenNotification(registration, local.tpSize);
  const targets = ranks.map((rank) => targetOf(consumer, rank));
  // All ranks are planned before a byte is written: if one cannot be planned, none is written.
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

/**
 * `"{the consumer's id}:{our TP size}"`; with the registration's secret for one of our consumers.
 */
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
 * One write for each pair of memory types; none if this rank has nothing for the target.
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
    // The consumer's plan reads from this rank: its local side is remote here.
    const descriptors = swapDirection(descriptorsInRegions(plan, read, includesRegion));
    const { length } = descriptors.runs ?? descriptors.localIds;
    return length === 0 ? [] : [{ lists: prepared, descriptors }];
  });
}

/**
 * Where the descriptors of one region lie in a list of a plan: ids `from` (included) to `until`
 * (excluded).
 */
interface RegionRange {
  readonly from: number;
  readonly until: number;
  readonly region: string;
}

/** Ranges by plan, then by source and list. A plan lives as long as the link to its engine. */
const rangesByPlan = new WeakMap<EngineTransferPlan, Map<string, readonly RegionRange[]>>();

/**
 * The descriptors of a planned read that lie in the regions for which `includes` is true. All of
 * them are returned as they are, without a copy.
 */
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
  // Ids are ordered by segment: the range of one id is mostly the range of the next.
  let range = wanted[0];
  for (let i = 0; i < remoteIds.length; i++) {
    const id = remoteIds[i] ?? 0;
    const inside = ({ from, until }: RegionRange) => id >= from && id < until;
    if (range === undefined) break;
    if (!inside(range)) {
      const other = wanted.find(inside);
      if (other === undefined) continue;
      range = other;
    }
    local[count] = localIds[i] ?? 0;
    remote[count] = id;
    count += 1;
  }
  return { localIds: local.subarray(0, count), remoteIds: remote.subarray(0, count) };
}

function rangesOf(
  plan: EngineTransferPlan,
  { sourceIndex, listIndex }: RequestRead,
): readonly RegionRange[] {
  const known = rangesByPlan.get(plan) ?? new Map<string, readonly RegionRange[]>();
  rangesByPlan.set(plan, known);
  const key = `${sourceIndex} ${listIndex}`;
  const found = known.get(key);
  if (found !== undefined) return found;
  const made = plan.segments.flatMap(({ list, remoteRegion }, index): RegionRange[] => {
    const indexing = plan.sources[sourceIndex]?.remoteIndexing[index];
    if (list !== listIndex || indexing === undefined || indexing.count === 0) return [];
    const { offset, count } = indexing;
    return [
      {
        from: offset,
        until: offset + count,
        region: plan.remote.regions[remoteRegion]?.name ?? "",
      },
    ];
  });
  known.set(key, made);
  return made;
}
