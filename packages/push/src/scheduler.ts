import { createEngineListener, createPrefillScheduler, pairSettings } from "@kv/connector";
import {
  ambient,
  type ConnectorRequest,
  type SchedulerConnector,
  type SchedulerOptions,
} from "@kv/interface";
import { createDecodeScheduler } from "./decode-scheduler.js";
import { PUSH, type PushStepMetadata } from "./step-metadata.js";

/** The scheduler side of push: both halves, for an engine is a producer or a consumer by what each request asks. */
export type PushScheduler = SchedulerConnector & Required<Pick<SchedulerConnector, "requestQueued">>;

export function createPushScheduler(options: SchedulerOptions): PushScheduler {
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
  const decode = createDecodeScheduler({ clock, config: cache, sideChannel: listener.address });
  const prefill = createPrefillScheduler({
    transferMode: "push",
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
  let step = 0;

  return {
    name: PUSH,
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
    buildStepMetadata(): PushStepMetadata {
      step += 1;
      return {
        connector: PUSH,
        step,
        schedulerClockMs: clock.now(),
        incarnation,
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
      const atRisk = new Set(
        output.failedReceiving.flatMap(({ requestId, blocksAtRisk }) =>
          blocksAtRisk === true ? [requestId] : [],
        ),
      );
      for (const requestId of output.finishedSending) prefill.sent(requestId);
      for (const requestId of output.finishedReceiving) decode.received(requestId, atRisk.has(requestId));
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
