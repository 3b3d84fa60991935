import {
  type Clock,
  KvError,
  type KvTransferConfig,
  type Log,
  type SchedulerOptions,
  type SideChannel,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import {
  decodeHandshakePayload,
  encodeHandshakePayload,
  type LeaseQuery,
  type LeaseReply,
} from "@kv/protocol";
import type { ConnectorSettings } from "../config/connector-settings.js";
import { type HandshakeListener, openHandshakeListener, type RankPayload } from "./handshake-listener.js";

/** Options of `EngineListener`. */
export interface EngineListenerOptions {
  readonly sideChannel: SideChannel;
  readonly clock: Clock;
  readonly log: Log;
  readonly config: KvTransferConfig;
  readonly engine: SchedulerOptions["engine"];
  readonly settings: Pick<ConnectorSettings, "perWorkerPorts">;
  /** Identifies this process to `@kv` peers. */
  readonly incarnation: string;
  /** Whether the blocks that D has read are still kept for its request and hold its prompt's KV; answers lease queries. */
  holds(query: LeaseQuery): Pick<LeaseReply, "held" | "prompt">;
}

/** The side channel of an engine. It opens when the workers' first payloads are published. Later payloads replace them. */
export class EngineListener implements AsyncDisposable {
  readonly #options: EngineListenerOptions;
  #listener: HandshakeListener | undefined;
  #closed = false;

  constructor(options: EngineListenerOptions) {
    this.#options = options;
  }

  /** Serves the workers' payloads. Errors: `KV_SIDE_CHANNEL_CLOSED` after `close`; `KV_SIDE_CHANNEL_BIND_FAILED`. */
  async publish(workers: readonly WorkerHandshakeMetadata[]): Promise<void> {
    if (this.#closed) throw new KvError("KV_SIDE_CHANNEL_CLOSED", "the scheduler connector is closed");
    const { sideChannel, clock, log, config, engine, settings, incarnation, holds } = this.#options;
    const payloads = workers.map((worker) => withIncarnation(worker, incarnation));
    if (this.#listener !== undefined) {
      this.#listener.publish(payloads);
      return;
    }
    this.#listener = await openHandshakeListener({
      sideChannel,
      clock,
      log,
      host: config.sideChannelHost,
      ports: portsOf(config, engine, settings.perWorkerPorts),
      payloads,
      lease: (query) => ({
        incarnation,
        ...(query.engineId === engine.engineId ? holds(query) : { held: false }),
      }),
    });
    if (this.#closed) await this.#listener.close();
  }

  /** Where peers shake hands. Errors: `KV_INTERNAL` before the first `publish`. */
  address(): { readonly host: string; readonly port: number } {
    if (this.#listener !== undefined) return this.#listener;
    throw new KvError(
      "KV_INTERNAL",
      "a request came before setHandshakeMetadata had opened the side channel",
      { hint: "await setHandshakeMetadata before the first request" },
    );
  }

  /** As `HandshakeListener.registrationGeneration`; 0 before the first `publish`. */
  get registrationGeneration(): number {
    return this.#listener?.registrationGeneration ?? 0;
  }

  /** Number of open ports. */
  get listeners(): number {
    return this.#listener?.listeners ?? 0;
  }

  /** Closes all ports, also when `publish` is still opening them. */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#listener?.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/** vLLM 0.33: port + data-parallel rank, one listener for all ranks. vLLM's older guide: port + dp_rank · tp_size + tp_rank. */
function portsOf(
  { sideChannelPort }: KvTransferConfig,
  { dpRank, tpSize }: SchedulerOptions["engine"],
  perWorker: boolean,
): number[] {
  // Port 0 takes a free port, for tests and for hosts without fixed ports.
  if (sideChannelPort === 0) return [0];
  if (!perWorker) return [sideChannelPort + dpRank];
  return Array.from({ length: tpSize }, (_, tpRank) => sideChannelPort + dpRank * tpSize + tpRank);
}

/** Adds this process's incarnation to a worker's payload; vLLM ignores the key. */
function withIncarnation(
  { tpRank, ppRank, payload }: WorkerHandshakeMetadata,
  incarnation: string,
): RankPayload {
  const decoded = decodeHandshakePayload(payload);
  const extension = { ...decoded.extension, incarnation };
  return { tpRank, ppRank, payload: encodeHandshakePayload({ ...decoded, extension }) };
}
