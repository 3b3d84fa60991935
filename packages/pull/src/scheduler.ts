import { createEngineListener, createPrefillScheduler, pairSettings } from "@kv/connector";
import {
  ambient,
  type ConnectorRequest,
  type SchedulerConnector,
  type SchedulerOptions,
} from "@kv/interface";
import { createDecodeScheduler } from "./decode-scheduler.js";
import { PULL, type PullStepMetadata } from "./step-metadata.js";

/** The scheduler side of pull: both halves, for an engine is a producer or a consumer by what each request asks. */
export type PullScheduler = SchedulerConnector & Required<Pick<SchedulerConnector, "requestQueued">>;

export function createPullScheduler(options: SchedulerOptions): PullScheduler {
  const { config, engine, cache, sideChannel } = options;
  const { clock, log, random } = ambient(options);
  const settings = pairSettings(config);
  const incarnation = random.uuid();
  const listener = createEngineListener({
    sideChannel,
    clock,
    log,
    config,
    engine,
    settings,
    incarnation,
    holds: (requestId, generation) => prefill.holds(requestId, generation),
  });
  let step = 0;

  const decode = createDecodeScheduler({ clock, config: cache });
  const prefill = createPrefillScheduler({
    transferMode: "pull",
    clock,
    config: cache,
    engineId: engine.engineId,
    tpSize: engine.tpSize,
    dcpSize: 1,
    ppSize: engine.ppSize,
    leaseMs: settings.leaseMs,
    ...(settings.unattendedLeaseMs === undefined ? {} : { unattendedLeaseMs: settings.unattendedLeaseMs }),
    incarnation,
    sideChannel: listener.address,
    registrationGeneration: () => listener.registrationGeneration,
  });

  return {
    name: PULL,
    loadFailurePolicy: config.loadFailurePolicy,
    setHandshakeMetadata: listener.publish,
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
      listeners: listener.listeners,
    }),
    async close() {
      decode.close();
      prefill.close();
      await listener.close();
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
