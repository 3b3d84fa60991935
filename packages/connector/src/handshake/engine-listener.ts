import {
  type Clock,
  KvError,
  type KvTransferConfig,
  type Log,
  type SchedulerOptions,
  type SideChannel,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import { decodeHandshakePayload, encodeHandshakePayload } from "@kv/protocol";
import { type HandshakeListener, openHandshakeListener, type RankPayload } from "./handshake-listener.js";
import type { PairSettings } from "../config/connector-settings.js";

/** The side channel of an engine: opened with the workers' first payloads, published anew with the next, closed once. */
export interface EngineListener {
  /** Errors: `KV_SIDE_CHANNEL_CLOSED` after `close`; `KV_SIDE_CHANNEL_BIND_FAILED`. */
  publish(workers: readonly WorkerHandshakeMetadata[]): Promise<void>;
  /** Where peers are sent to. Errors: `KV_INTERNAL` before the first `publish`. */
  address(): { readonly host: string; readonly port: number };
  readonly registrationGeneration: number;
  readonly listeners: number;
  close(): Promise<void>;
}

export interface EngineListenerOptions {
  readonly sideChannel: SideChannel;
  readonly clock: Clock;
  readonly log: Log;
  readonly config: KvTransferConfig;
  readonly engine: SchedulerOptions["engine"];
  readonly settings: Pick<PairSettings, "perWorkerPorts" | "handshakeKey">;
  /** Which process this is, told to our own peers alone. */
  readonly incarnation: string;
  /** Whether the blocks of a request are still kept, for `leases-check`. */
  holds(requestId: string, generation: number | undefined): boolean;
}

export function createEngineListener(options: EngineListenerOptions): EngineListener {
  const { sideChannel, clock, log, config, engine, settings, incarnation } = options;
  let listener: HandshakeListener | undefined;
  let closed = false;

  return {
    async publish(workers) {
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
        ...(settings.handshakeKey === undefined ? {} : { key: settings.handshakeKey }),
        lease: ({ engineId, requestId, generation }) => ({
          incarnation,
          held: engineId === engine.engineId && options.holds(requestId, generation),
        }),
      });
      if (closed) await listener.close();
    },
    address() {
      if (listener !== undefined) return listener;
      throw new KvError(
        "KV_INTERNAL",
        "a request came before setHandshakeMetadata had opened the side channel",
      );
    },
    get registrationGeneration() {
      return listener?.registrationGeneration ?? 0;
    },
    get listeners() {
      return listener?.listeners ?? 0;
    },
    async close() {
      closed = true;
      await listener?.close();
    },
  };
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
