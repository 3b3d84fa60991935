import {
  type Clock,
  KvError,
  type KvTransferConfig,
  type Log,
  type SchedulerOptions,
  type SideChannel,
  type SideChannelListener,
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
import { type RankKey, rankKey } from "../requests/remote-request.js";

/** Options of `EngineListener`. */
export interface EngineListenerOptions {
  readonly sideChannel: SideChannel;
  readonly clock: Clock;
  readonly log: Log;
  readonly config: KvTransferConfig;
  readonly engine: SchedulerOptions["engine"];
  readonly settings: Pick<ConnectorSettings, "perWorkerPorts">;
  readonly incarnation: string;
  /**
   * Whether the blocks that D has read are still kept for its request and hold its prompt's KV;
   * answers lease queries.
   */
  holds(query: LeaseQuery): Pick<LeaseReply, "held" | "prompt">;
}

/** Where peers shake hands with an engine. */
export interface ListenerAddress {
  readonly host: string;
  readonly port: number;
  /**
   * How often a new or changed payload of a rank was published: `remote_registration_generation` of
   * `kv_transfer_params`.
   */
  readonly registrationGeneration: number;
}

/**
 * The side channel of an engine (vLLM: `_nixl_handshake_listener`), in the process whose clock the
 * leases are stamped with: it serves the workers' handshake payloads and answers lease queries. It
 * opens when the first payloads are published, because an open port without payloads would refuse
 * the first peers. Unlike vLLM's, it keeps serving after malformed input: a malformed request gets
 * no reply, and a rank that does not exist gets a refusal, which a vLLM client treats as a failed
 * handshake at once instead of after its timeout.
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
   * Serves these payloads from now on, by rank. Returns where peers shake hands.
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
    const { sideChannelHost } = this.#options.config;
    if (first === undefined)
      throw new KvError(
        "KV_SIDE_CHANNEL_BIND_FAILED",
        `no port to listen on at ${sideChannelHost}`,
      );
    return {
      host: first.host,
      port: first.port,
      registrationGeneration: this.#registrationGeneration,
    };
  }

  get listeners(): number {
    return this.#listeners.length;
  }

  /** Closes all ports, also when `publish` is still opening them. Safe to call twice. */
  async close(): Promise<void> {
    this.#closed = true;
    const listeners = this.#listeners;
    this.#listeners = [];
    await Promise.all(listeners.map((listener) => listener.close()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** Adds this process's incarnation to the payload; vLLM ignores the key. */
  #replacePayload({ ppRank, tpRank, payload }: WorkerHandshakeMetadata): void {
    const key = rankKey({ ppRank, tpRank });
    const before = this.#payloads.get(key);
    // Peers with an older handshake hold stale metadata: the generation in `kv_transfer_params`
    // makes them shake hands again.
    if (before !== undefined && sameBytes(before.published, payload)) return;
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
      await Promise.all(opened.map((listener) => listener.close()));
      throw error;
    }
  }

  /** The reply to a request on the side channel; undefined for none. */
  #answer(frames: readonly Uint8Array[]): readonly Uint8Array[] | undefined {
    const { clock, engine, incarnation, holds } = this.#options;
    const query = decodeLeaseQuery(frames);
    if (query !== undefined) {
      const held = query.engineId === engine.engineId ? holds(query) : { held: false };
      return [
        encodeLeaseReply({
          incarnation,
          registrationGeneration: this.#registrationGeneration,
          ...held,
        }),
      ];
    }
    try {
      const { ppRank, tpRank } = decodeHandshakeRequest(frames);
      const payload = this.#sealed({ ppRank, tpRank });
      if (payload !== undefined) return encodeHandshakeReply(payload, clock.now() / 1000);
      const known = [...this.#payloads.keys()];
      this.#warnings.warn("handshake-for-unknown-rank", "rank", { ppRank, tpRank, known });
      const ranks = known.join(", ") || "none yet";
      return [
        encodeHandshakeRefusal(
          `this engine has no rank (pp ${ppRank}, tp ${tpRank}); it has ${ranks}`,
        ),
      ];
    } catch (error) {
      if (!KvError.is(error)) throw error;
      this.#warnings.warn("handshake-request-refused", error.code, {
        code: error.code,
        error: error.message,
      });
      return undefined;
    }
  }

  /** The rank's payload with the generation of all payloads. Undefined for an unknown rank. */
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

/** The payload of one rank. */
interface ServedPayload {
  readonly published: Uint8Array;
  readonly payload: HandshakePayload;
  /** Made at the first request, and again when the generation has changed. */
  sealed?: { readonly bytes: Uint8Array; readonly generation: number };
}

/**
 * vLLM 0.33: port + data-parallel rank, one listener for all ranks. vLLM's older guide: port +
 * dp_rank · tp_size + tp_rank.
 */
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

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.byteLength === b.byteLength && a.every((byte, index) => byte === b[index]);
}
