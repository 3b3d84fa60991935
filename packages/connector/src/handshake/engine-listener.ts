import {
  type Clock,
  KvError,
  type KvTransferConfig,
  type Log,
  type SchedulerOptions,
  type SideChannel,
  type SideChannelListener,
  settleAll,
  type WorkerHandshakeMetadata,
} from "@kv/interface";
import {
  decodeHandshakePayload,
  decodeHandshakeRequest,
  decodeLeaseQuery,
  encodeHandshakePayload,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  encodeLeaseReply,
  type HandshakePayload,
  type LeaseQuery,
  type LeaseReply,
  sealHandshake,
} from "@kv/protocol";
import { LimitedWarnings } from "@kv/side-channel";
import type { ConnectorSettings } from "../config/connector-settings.js";
import { type RankKey, rankKey } from "../requests/references.js";

export interface EngineListenerOptions {
  readonly sideChannel: SideChannel;
  readonly clock: Clock;
  readonly log: Log;
  readonly config: KvTransferConfig;
  readonly engine: SchedulerOptions["engine"];
  readonly settings: Pick<ConnectorSettings, "perWorkerPorts">;
  readonly incarnation: string;
  holds(query: LeaseQuery): Pick<LeaseReply, "held" | "prompt">;
}

export interface ListenerAddress {
  readonly host: string;
  readonly port: number;
  /** Counts a rank's new payloads: `remote_registration_generation`. */
  readonly registrationGeneration: number;
}

/**
 * An engine's side channel (vLLM: `_nixl_handshake_listener`), in the process whose clock stamps
 * the leases. Serves handshake payloads and answers lease queries. Unlike vLLM's, it survives
 * malformed input, and its refusal of unknown ranks ends a vLLM client's handshake at once.
 */
export class EngineListener implements AsyncDisposable {
  readonly #options: EngineListenerOptions;
  readonly #warnings: LimitedWarnings;
  readonly #payloads = new Map<RankKey, ServedPayload>();
  #registrationGeneration = 0;
  #listeners: readonly SideChannelListener[] = [];
  #closed = false;

  constructor(options: EngineListenerOptions) {
    this.#options = options;
    this.#warnings = new LimitedWarnings(options.clock, options.log);
  }

  /**
   * Serves these payloads from now on; the first call opens the ports.
   * @throws `KV_SIDE_CHANNEL_CLOSED` after `close`; `KV_SIDE_CHANNEL_BIND_FAILED`; those of
   * `decodeHandshakePayload`.
   */
  async publish(workers: readonly WorkerHandshakeMetadata[]): Promise<ListenerAddress> {
    if (this.#closed)
      throw new KvError("KV_SIDE_CHANNEL_CLOSED", "the scheduler connector is closed");
    for (const worker of workers) this.#replacePayload(worker);
    if (this.#listeners.length === 0) this.#listeners = await this.#listen();
    const [first] = this.#listeners;
    if (this.#closed) await this.close();
    if (first === undefined) {
      const message = `no port to listen on at ${this.#options.config.sideChannelHost}`;
      throw new KvError("KV_SIDE_CHANNEL_BIND_FAILED", message);
    }
    return {
      host: first.host,
      port: first.port,
      registrationGeneration: this.#registrationGeneration,
    };
  }

  get listeners(): number {
    return this.#listeners.length;
  }

  /** Works while `publish` is opening ports, and a second time. */
  async close(): Promise<void> {
    this.#closed = true;
    const listeners = this.#listeners;
    this.#listeners = [];
    await settleAll(listeners.map((listener) => listener.close()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** Adds this process's incarnation, which vLLM ignores. */
  #replacePayload({ ppRank, tpRank, payload }: WorkerHandshakeMetadata): void {
    const key = rankKey({ ppRank, tpRank });
    const before = this.#payloads.get(key);
    // The higher generation in `kv_transfer_params` makes peers repeat the handshake.
    if (before !== undefined && Buffer.compare(before.published, payload) === 0) return;
    const published = payload.slice();
    const decoded = decodeHandshakePayload(published);
    const extension = { ...decoded.extension, incarnation: this.#options.incarnation };
    this.#registrationGeneration += 1;
    this.#payloads.set(key, { published, payload: { ...decoded, extension } });
  }

  async #listen(): Promise<SideChannelListener[]> {
    const { sideChannel, config, engine, settings } = this.#options;
    const opened: SideChannelListener[] = [];
    try {
      for (const port of portsOf(config, engine, settings.perWorkerPorts)) {
        const answer = (frames: readonly Uint8Array[]) => this.#answer(frames);
        opened.push(await sideChannel.listen({ host: config.sideChannelHost, port, answer }));
      }
      return opened;
    } catch (error) {
      await settleAll(opened.map((listener) => listener.close())).catch(() => {});
      throw error;
    }
  }

  #answer(frames: readonly Uint8Array[]): readonly Uint8Array[] | undefined {
    const { clock, engine, incarnation, holds } = this.#options;
    const query = decodeLeaseQuery(frames);
    if (query !== undefined) {
      const held = query.engineId === engine.engineId ? holds(query) : { held: false };
      const registrationGeneration = this.#registrationGeneration;
      return [encodeLeaseReply({ incarnation, registrationGeneration, ...held })];
    }
    try {
      const { ppRank, tpRank } = decodeHandshakeRequest(frames);
      const payload = this.#sealed({ ppRank, tpRank });
      if (payload !== undefined) return encodeHandshakeReply(payload, clock.now() / 1000);
      const known = [...this.#payloads.keys()];
      this.#warnings.warn("handshake-for-unknown-rank", "rank", { ppRank, tpRank, known });
      const ranks = known.join(", ") || "none yet";
      const refusal = `this engine has no rank (pp ${ppRank}, tp ${tpRank}); it has ${ranks}`;
      return [encodeHandshakeRefusal(refusal)];
    } catch (error) {
      if (!KvError.is(error)) throw error;
      const { code, message } = error;
      this.#warnings.warn("handshake-request-refused", code, { code, error: message });
      return undefined;
    }
  }

  /** Undefined for an unknown rank. */
  #sealed(rank: { readonly ppRank: number; readonly tpRank: number }): Uint8Array | undefined {
    const served = this.#payloads.get(rankKey(rank));
    if (served === undefined) return undefined;
    const generation = this.#registrationGeneration;
    if (served.sealed?.generation !== generation) {
      const { payload } = served;
      const extension = { ...payload.extension, registration_generation: generation };
      const bytes = sealHandshake(encodeHandshakePayload({ ...payload, extension }), rank);
      served.sealed = { bytes, generation };
    }
    return served.sealed.bytes;
  }
}

interface ServedPayload {
  readonly published: Uint8Array;
  readonly payload: HandshakePayload;
  sealed?: { readonly bytes: Uint8Array; readonly generation: number };
}

/**
 * vLLM 0.33: one listener at port + dp_rank. vLLM's older guide: port + dp_rank · tp_size +
 * tp_rank.
 */
function portsOf(
  { sideChannelPort }: KvTransferConfig,
  { dpRank, tpSize }: SchedulerOptions["engine"],
  perWorker: boolean,
): number[] {
  // Port 0 takes a free port.
  if (sideChannelPort === 0) return [0];
  if (!perWorker) return [sideChannelPort + dpRank];
  return Array.from({ length: tpSize }, (_, tpRank) => sideChannelPort + dpRank * tpSize + tpRank);
}
