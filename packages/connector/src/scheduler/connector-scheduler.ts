import {
  ambient,
  type Clock,
  type ConnectorRequest,
  type SchedulerConnector,
  type SchedulerOptions,
  type StepMetadata,
} from "@kv/interface";
import type { DecodeRequests } from "./decode-requests.js";
import { createEngineListener } from "../handshake/engine-listener.js";
import { pairSettings } from "../config/connector-settings.js";
import { createPrefillScheduler } from "./prefill-scheduler.js";

/** The scheduler side of a pair: both halves, for an engine is a producer or a consumer by what each request asks. */
export type PairScheduler = SchedulerConnector & Required<Pick<SchedulerConnector, "requestQueued">>;

/** The consumer's half, with what it asks of the workers. */
export interface DecodeScheduler<Step> extends DecodeRequests {
  takeStep(): Step;
  hasStep(): boolean;
}

export interface PairSchedulerOptions<DecodeStep> {
  readonly name: string;
  readonly transferMode: "pull" | "push";
  createDecode(around: {
    readonly clock: Clock;
    readonly options: SchedulerOptions;
    /** Where peers are sent to; once the listener is open. */
    address(): { readonly host: string; readonly port: number };
  }): DecodeScheduler<DecodeStep>;
}

export function createPairScheduler<DecodeStep extends object>(
  options: SchedulerOptions,
  pair: PairSchedulerOptions<DecodeStep>,
): PairScheduler {
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
  const decode = pair.createDecode({ clock, options, address: listener.address });
  const prefill = createPrefillScheduler({
    transferMode: pair.transferMode,
    clock,
    config: cache,
    engineId: engine.engineId,
    tpSize: engine.tpSize,
    dcpSize: 1,
    ppSize: engine.ppSize,
    leaseMs: settings.leaseMs,
    ...(settings.unattendedLeaseMs === undefined ? {} : { unattendedLeaseMs: settings.unattendedLeaseMs }),
    incarnation,
    layerwise: settings.layerwise && pair.transferMode === "push",
    sideChannel: listener.address,
    registrationGeneration: () => listener.registrationGeneration,
  });
  let step = 0;

  return {
    name: pair.name,
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
    buildStepMetadata(): StepMetadata {
      step += 1;
      return {
        connector: pair.name,
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
      const atRisk = new Set<string>();
      for (const { requestId, blocksAtRisk } of output.failedReceiving) {
        if (blocksAtRisk === true) atRisk.add(requestId);
      }
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
