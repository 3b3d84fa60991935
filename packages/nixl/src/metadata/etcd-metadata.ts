import {
  type Ambient,
  type AmbientOptions,
  ambient,
  KvError,
  type Registration,
  type Timer,
} from "@kv/interface";
import type { Environment } from "../environment.js";
import { formatValue, requireObject } from "../validate.js";
import { EtcdClient, type EtcdTls } from "./etcd-client.js";
import type { MetadataAgent } from "./socket-metadata.js";

/** Options of `etcdMetadata`. */
export interface EtcdMetadataOptions extends AmbientOptions {
  /** URLs of etcd, in order of preference. @default `NIXL_ETCD_ENDPOINTS`, separated by commas */
  readonly endpoints?: readonly string[] | undefined;
  /** Certificates for `https:` endpoints. */
  readonly tls?: EtcdTls | undefined;
  /** Prefix of all keys. @default `NIXL_ETCD_NAMESPACE`, else NIXL's own, `/nixl/agents/` */
  readonly namespace?: string | undefined;
  /** How long the keys of an agent stay after its process has died: 2 to 3600 s. @default 10 */
  readonly leaseSeconds?: number | undefined;
  /**
   * Called when the keys of a fetched peer have gone: it has closed, or has died. The agent has
   * forgotten it by then; `inUse` is true when prepared lists keep it known, so close them and call
   * `removeRemote`.
   */
  readonly onGone?: ((name: string, inUse: boolean) => void) | undefined;
}

/** Options of `EtcdMetadata.fetch`. */
export interface EtcdFetchOptions {
  /** How long to wait for a peer that has not published yet. @default 5_000 */
  readonly timeoutMs?: number | undefined;
}

const DEFAULT_NAMESPACE = "/nixl/agents/";
const DEFAULT_LEASE_SECONDS = 10;
const DEFAULT_FETCH_MS = 5000;
/** Pause before a watch that has failed begins again. */
const RETRY_MS = 500;

/**
 * Exchanges metadata of an agent through etcd, under NIXL's own keys: agents of other processes
 * with `NIXL_ETCD_ENDPOINTS`, such as Python's, find this one and are found. NIXL writes its keys
 * for ever. Here they have a lease, so that they go when the process dies. Throws
 * `KV_CONFIG_INVALID`.
 */
export function etcdMetadata(
  agent: MetadataAgent,
  options: EtcdMetadataOptions = {},
  environment: Environment = process.env,
): EtcdMetadata {
  requireObject(options, "KV_CONFIG_INVALID", "the options of etcdMetadata");
  return new EtcdMetadata(agent, {
    ...options,
    client: new EtcdClient(
      endpointsOf(options.endpoints ?? environment.NIXL_ETCD_ENDPOINTS?.split(",")),
      tlsOf(options.tls),
    ),
    namespace: options.namespace ?? (environment.NIXL_ETCD_NAMESPACE || DEFAULT_NAMESPACE),
    leaseSeconds: leaseOf(options.leaseSeconds),
  });
}

/** What `etcdMetadata` returns. */
export class EtcdMetadata implements AsyncDisposable {
  readonly #agent: MetadataAgent;
  readonly #client: EtcdClient;
  readonly #ambient: Ambient;
  readonly #namespace: string;
  readonly #leaseSeconds: number;
  readonly #onGone: EtcdMetadataOptions["onGone"];
  readonly #stop = new AbortController();
  /** The watches of fetched peers, by name. */
  readonly #watches = new Map<string, Promise<void>>();
  #published: Uint8Array | undefined;
  #lease: string | undefined;
  #timer: Timer | undefined;

  /** For `etcdMetadata`. */
  constructor(
    agent: MetadataAgent,
    options: EtcdMetadataOptions & { client: EtcdClient; namespace: string; leaseSeconds: number },
  ) {
    this.#agent = agent;
    this.#client = options.client;
    this.#ambient = ambient(options);
    this.#namespace = options.namespace;
    this.#leaseSeconds = options.leaseSeconds;
    this.#onGone = options.onGone;
  }

  /**
   * Publishes the agent's metadata, of all its memory or of `registrations` (Python:
   * `send_local_metadata`); again after more memory was registered. Its lease is renewed every
   * third of `leaseSeconds` until `close`, and the keys are written anew when it has ended
   * meanwhile. Rejects with `KV_SIDE_CHANNEL_UNREACHABLE` and `KV_SIDE_CHANNEL_CLOSED`.
   */
  readonly publish = async (
    options: { readonly registrations?: readonly Registration[] | undefined } = {},
  ): Promise<void> => {
    this.#requireOpen();
    const { registrations } = options;
    this.#published = await this.#agent.localMetadata(
      registrations === undefined ? {} : { registrations },
    );
    await this.#write();
    this.#renewLater();
  };

  /**
   * Adds a peer from its published metadata, or waits until it publishes it, and returns its name
   * (Python: `fetch_remote_metadata`). From then on the peer is watched: see `onGone`. Rejects with
   * `KV_SIDE_CHANNEL_TIMEOUT`, `KV_SIDE_CHANNEL_UNREACHABLE`, `KV_SIDE_CHANNEL_CLOSED`, with
   * `KV_AGENT_METADATA_INVALID` when the metadata is another agent's, and as `addRemote` does.
   */
  readonly fetch = async (name: string, options: EtcdFetchOptions = {}): Promise<string> => {
    this.#requireOpen();
    const { metadata, revision } = await this.#read(name, options.timeoutMs ?? DEFAULT_FETCH_MS);
    const found = agentNameIn(metadata);
    // Before it is loaded: it must not replace what is known of another peer.
    if (found !== undefined && found !== name) {
      throw new KvError(
        "KV_AGENT_METADATA_INVALID",
        `etcd has metadata of ${formatValue(found)} under the name ${formatValue(name)}`,
      );
    }
    await this.#agent.addRemote(metadata);
    if (!this.#watches.has(name)) this.#watches.set(name, this.#watch(name, revision));
    return name;
  };

  /**
   * Removes the agent's keys (Python: `invalidate_local_metadata`), and stops watching peers, which
   * stay known.
   */
  readonly close = async (): Promise<void> => {
    this.#stop.abort();
    this.#timer?.cancel();
    await Promise.all(this.#watches.values());
    const lease = this.#lease;
    this.#lease = undefined;
    if (lease === undefined) return;
    // The keys go with the lease in any case.
    await this.#client
      .revokeLease(lease)
      .catch((error: unknown) => this.#warn("nixl-etcd-revoke-failed", error));
  };

  /** The same as `close()`. */
  readonly [Symbol.asyncDispose] = (): Promise<void> => this.close();

  /** NIXL's keys: an empty one that stands for the agent and that others watch, and one a label. */
  #key(name: string, label: string): string {
    return `${this.#namespace}/${name}/${label}`;
  }

  async #write(): Promise<void> {
    const { name } = this.#agent;
    if (this.#lease === undefined) {
      this.#lease = await this.#client.grantLease(this.#leaseSeconds);
      // Once a lease: NIXL's agents log an error when the key that they watch is written again.
      await this.#client.put(this.#key(name, ""), new Uint8Array(0), this.#lease);
    }
    await this.#client.put(this.#key(name, "metadata"), this.#published as Uint8Array, this.#lease);
  }

  #renewLater(): void {
    this.#timer?.cancel();
    if (this.#stop.signal.aborted) return;
    this.#timer = this.#ambient.clock.setTimer(
      () => void this.#renew(),
      (this.#leaseSeconds * 1000) / 3,
    );
  }

  async #renew(): Promise<void> {
    const lease = this.#lease;
    if (lease === undefined) return;
    try {
      if (!(await this.#client.keepLeaseAlive(lease)) && this.#lease === lease) {
        // The process was paused, or etcd could not be reached, for too long: the keys are gone.
        this.#lease = undefined;
        await this.#write();
      }
    } catch (error) {
      this.#warn("nixl-etcd-renewal-failed", error);
    }
    this.#renewLater();
  }

  async #read(
    name: string,
    timeoutMs: number,
  ): Promise<{ metadata: Uint8Array; revision: bigint }> {
    const key = this.#key(name, "metadata");
    const { value, revision } = await this.#client.get(key);
    if (value !== undefined && value.length > 0) return { metadata: value, revision };
    let metadata: Uint8Array | undefined;
    const late = AbortSignal.timeout(timeoutMs);
    const onEvent = (event: { type: string; value: Uint8Array }) => {
      if (event.type === "PUT" && event.value.length > 0) metadata = event.value;
      return metadata === undefined;
    };
    await this.#client.watch(key, revision, onEvent, AbortSignal.any([late, this.#stop.signal]));
    this.#requireOpen();
    if (metadata === undefined) {
      throw new KvError(
        "KV_SIDE_CHANNEL_TIMEOUT",
        `"${name}" did not publish metadata in etcd within ${timeoutMs} ms`,
      );
    }
    return { metadata, revision };
  }

  /** Watches a peer's key until it goes. Never rejects. */
  async #watch(name: string, from: bigint): Promise<void> {
    const { signal } = this.#stop;
    const key = this.#key(name, "");
    let revision = from;
    for (;;) {
      let gone = false;
      const onEvent = ({ type }: { type: string }) => {
        gone = type === "DELETE";
        return !gone;
      };
      await this.#client
        .watch(key, revision, onEvent, signal)
        .catch((error: unknown) => this.#warn("nixl-etcd-watch-failed", error));
      if (signal.aborted) return;
      if (gone) break;
      await new Promise<void>((resolve) =>
        this.#ambient.clock.setTimer(resolve, RETRY_MS, { ref: true }),
      );
      // What happened meanwhile shows in the key itself.
      const now = await this.#client.get(key).catch(() => undefined);
      if (now !== undefined && now.value === undefined) break;
      revision = now?.revision ?? revision;
    }
    this.#watches.delete(name);
    const inUse = await this.#agent.removeRemote(name).then(
      () => false,
      (error: unknown) => KvError.is(error, "KV_MEMORY_IN_USE"),
    );
    this.#onGone?.(name, inUse);
  }

  #warn(event: string, error: unknown): void {
    this.#ambient.log.warn(event, { agent: this.#agent.name, error: String(error) });
  }

  #requireOpen(): void {
    if (!this.#stop.signal.aborted) return;
    throw new KvError("KV_SIDE_CHANNEL_CLOSED", "the exchange of metadata through etcd is closed");
  }
}

/**
 * The name with which NIXL's metadata begins; undefined for other bytes, which the addon refuses.
 */
function agentNameIn(metadata: Uint8Array): string | undefined {
  const bytes = Buffer.from(metadata.buffer, metadata.byteOffset, metadata.byteLength);
  const head = "nixlSerDes|Agent";
  const at = head.length + 8;
  if (bytes.length < at || bytes.toString("latin1", 0, head.length) !== head) return undefined;
  const length = bytes.readBigUInt64LE(head.length);
  return length > 255n ? undefined : bytes.toString("latin1", at, at + Number(length));
}

function endpointsOf(endpoints: readonly string[] | undefined): URL[] {
  const texts = (endpoints ?? []).map((text) => String(text).trim()).filter((text) => text !== "");
  if (texts.length === 0) {
    throw new KvError("KV_CONFIG_INVALID", "no endpoint of etcd is named", {
      hint: "set the option endpoints, or NIXL_ETCD_ENDPOINTS, such as http://127.0.0.1:2379",
    });
  }
  return texts.map((text) => {
    const url = URL.canParse(text) ? new URL(text) : undefined;
    if (url?.protocol === "http:" || url?.protocol === "https:") return url;
    throw new KvError("KV_CONFIG_INVALID", `${formatValue(text)} is not a URL of etcd`, {
      hint: "such as http://127.0.0.1:2379",
    });
  });
}

function tlsOf(tls: EtcdTls = {}): EtcdTls {
  requireObject(tls, "KV_CONFIG_INVALID", "the option tls of etcdMetadata");
  // A value may be a secret, so the message states its type only.
  for (const name of ["ca", "cert", "key"] as const) {
    const value: unknown = tls[name];
    if (value === undefined || typeof value === "string") continue;
    throw new KvError("KV_CONFIG_INVALID", `tls.${name} is a ${typeof value}, not PEM text`);
  }
  const { ca, cert, key } = tls;
  if ((cert === undefined) === (key === undefined)) return { ca, cert, key };
  throw new KvError(
    "KV_CONFIG_INVALID",
    `tls.${cert === undefined ? "key" : "cert"} is given alone`,
    {
      hint: "give the certificate and its key",
    },
  );
}

function leaseOf(seconds: number = DEFAULT_LEASE_SECONDS): number {
  if (Number.isInteger(seconds) && seconds >= 2 && seconds <= 3600) return seconds;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `leaseSeconds is ${formatValue(seconds)}, not a whole number from 2 to 3600`,
  );
}
