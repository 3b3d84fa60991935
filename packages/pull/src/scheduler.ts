import {
  decodeHandshakePayload,
  encodeHandshakePayload,
  type HandshakeListener,
  openHandshakeListener,
  type RankPayload,
} from "@kv/connector";
import {
  ambient,
  type ConnectorRequest,
  KvError,
  type KvTransferConfig,
  type SchedulerConnector,
  type SchedulerOptions,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import { createDecodeScheduler } from "./decode-scheduler.js";
import { createPrefillScheduler } from "./prefill-scheduler.js";
import { pullSettings } from "./settings.js";
import { PULL, type PullStepMetadata } from "./step-metadata.js";

/** The scheduler side of pull: both halves, for an engine is a producer or a consumer by what each request asks. */
export type PullScheduler = SchedulerConnector & Required<Pick<SchedulerConnector, "requestQueued">>;

export function createPullScheduler(options: SchedulerOptions): PullScheduler {
  const { config, engine, cache, sideChannel } = options;
  const { clock, log, random } = ambient(options);
  const settings = pullSettings(config);
  const incarnation = random.uuid();
  let listener: HandshakeListener | undefined;
  let step = 0;
  let closed = false;

  const decode = createDecodeScheduler({ clock, config: cache });
  const prefill = createPrefillScheduler({
    clock,
    config: cache,
    engineId: engine.engineId,
    tpSize: engine.tpSize,
    dcpSize: 1,
    ppSize: engine.ppSize,
    leaseMs: settings.leaseMs,
    ...(settings.unattendedLeaseMs === undefined ? {} : { unattendedLeaseMs: settings.unattendedLeaseMs }),
    incarnation,
    sideChannel() {
      if (listener !== undefined) return listener;
      throw new KvError(
        "KV_INTERNAL",
        "a request finished before setHandshakeMetadata opened the side channel",
      );
    },
    registrationGeneration: () => listener?.registrationGeneration ?? 0,
  });

  return {
    name: PULL,
    loadFailurePolicy: config.loadFailurePolicy,
    async setHandshakeMetadata(workers) {
      if (closed) throw new KvError("KV_SIDE_CHANNEL_CLOSED", "the scheduler connector is closed");
      const payloads = workers.map((worker) => withIncarnation(worker, incarnation));
      if (listener !== undefined) {
        listener.publish(payloads);
        return;
      }
      listener = await openHandshakeListener({
        sideChannel,
        clock,
        log,
        host: config.sideChannelHost,
        ports: portsOf(config, engine, settings.perWorkerPorts),
        payloads,
        lease: ({ engineId, requestId, generation }) => ({
          incarnation,
          held: engineId === engine.engineId && prefill.holds(requestId, generation),
        }),
      });
      if (closed) await listener.close();
    },
    requestQueued(request) {
      if (asks(request, "do_remote_prefill")) decode.queued(request);
    },
    matchedTokens(request, numComputedTokens) {
      if (!asks(request, "do_remote_prefill")) return { tokens: 0, async: false };
      return decode.matched(request, numComputedTokens);
    },
    afterAllocation(request, blockIds, externalTokens) {
      if (asks(request, "do_remote_prefill")) decode.allocated(request, blockIds, externalTokens);
      else if (asks(request, "do_remote_decode")) prefill.admitted(request, blockIds);
    },
    buildStepMetadata(): PullStepMetadata {
      step += 1;
      return {
        connector: PULL,
        step,
        schedulerClockMs: clock.now(),
        ...prefill.takeStep(),
        ...decode.takeStep(),
      };
    },
    requestFinished(request, blockIds, reason) {
      if (asks(request, "do_remote_prefill")) return decode.finished(request);
      if (asks(request, "do_remote_decode")) return prefill.finished(request, blockIds, reason);
      return { keepBlocks: false };
    },
    applyWorkerOutput(output) {
      for (const requestId of output.finishedSending) prefill.sent(requestId);
      for (const requestId of output.finishedReceiving) decode.received(requestId);
    },
    hasPendingWork: () => prefill.hasStep() || decode.hasStep(),
    outstanding: () => ({
      running: prefill.running,
      leases: prefill.leases,
      requests: decode.requests,
      heartbeats: decode.heartbeats,
      listeners: listener?.listeners ?? 0,
    }),
    async close() {
      closed = true;
      decode.close();
      prefill.close();
      await listener?.close();
    },
  };
}

/** Anything but true or absent is looked at, and refused, where parameters are read. */
function asks(
  { kvTransferParams }: ConnectorRequest,
  key: "do_remote_prefill" | "do_remote_decode",
): boolean {
  const value = kvTransferParams?.[key];
  return value !== undefined && value !== null && value !== false;
}

/** vLLM 0.33: port + data parallel rank, one listener for all ranks. The older guide: port + dp_rank · tp_size + tp_rank. */
function portsOf(
  { sideChannelPort }: KvTransferConfig,
  { dpRank, tpSize }: SchedulerOptions["engine"],
  perWorker: boolean,
): number[] {
  // Port 0 takes a free one, for tests and for hosts where nothing is fixed.
  if (sideChannelPort === 0) return [0];
  if (!perWorker) return [sideChannelPort + dpRank];
  return Array.from({ length: tpSize }, (_, tpRank) => sideChannelPort + dpRank * tpSize + tpRank);
}

/** Adds what this process alone knows to a worker's payload; vLLM ignores the key. */
function withIncarnation(
  { tpRank, ppRank, payload }: WorkerHandshakeMetadata,
  incarnation: string,
): RankPayload {
  const decoded = decodeHandshakePayload(payload);
  const extension = { ...decoded.extension, incarnation };
  return { tpRank, ppRank, payload: encodeHandshakePayload({ ...decoded, extension }) };
}
