import type { IncomingHttpHeaders } from "node:http";
import {
  type Discovery,
  type InstanceKv,
  type InstancePool,
  type InstanceSpec,
  instanceName,
  type PooledInstance,
  parseInstanceSpec,
} from "@kv/fleet";
import { PREFILLER_HEADER } from "@kv/fleet/front-end";
import { shortened } from "@kv/http";
import { type Clock, KvError, type Log } from "@kv/interface";
import { Allowlist } from "./allowlist.js";

/** More instances in one header are refused. */
export const MAX_NAMED = 16;
/** How long a prefill instance that no request names is remembered. */
const REMEMBERED_MS = 600_000;
/** More are not remembered. Each has a side channel that is read, and counts. */
const MAX_REMEMBERED = 1024;

const HOST_PORT = /^(\[[0-9a-f:.]+\]|[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?):[0-9]{1,5}(@[0-9]{1,5})?$/i;

/** What `NamedPrefillers` gets. */
export interface NamedPrefillersOptions {
  /** Named instances are added to it. */
  readonly pool: InstancePool;
  /** Entries of an `Allowlist`. */
  readonly allow: readonly string[];
  /** Its prefill instances are allowed too, with what it knows of them. */
  readonly discovery: Discovery | undefined;
  /** Whether prefill instances are reached by HTTPS. */
  readonly tls: boolean;
  /** Of the engines of all prefill instances that no discovery describes. */
  readonly kv: InstanceKv | undefined;
  readonly clock: Clock;
  readonly log: Log;
}

/**
 * The prefill instances that requests name in a header. The header decides where this process sends
 * requests, so each instance must be on the allowlist or be found by the discovery. Instances are
 * added to the pool when they are named first, and removed when no request has named them for ten
 * minutes.
 */
export class NamedPrefillers {
  readonly #options: NamedPrefillersOptions;
  readonly #allowlist: Allowlist;
  /** The prefill instances of the discovery, by name. */
  #found: ReadonlyMap<string, InstanceSpec> = new Map();
  readonly #watch: { close(): void } | undefined;
  /** When each was named last, the earliest first. */
  readonly #namedAtMs = new Map<PooledInstance, number>();

  /** @throws `KV_CONFIG_INVALID` for an entry of the allowlist that cannot be read. */
  constructor(options: NamedPrefillersOptions) {
    const { allow, discovery, tls, log } = options;
    this.#options = options;
    this.#allowlist = new Allowlist(allow);
    this.#watch = discovery?.watch(
      ({ prefillers }) => {
        const specs = tls ? prefillers.map(withTls) : prefillers;
        this.#found = new Map(specs.map((spec) => [instanceName(spec), spec]));
      },
      (error) => log.warn("discovery-failed", { by: discovery.name, error }),
    );
  }

  /**
   * The prefill instances that a request names, in their order; empty where it names none.
   * @throws `KV_REQUEST_INVALID`, 400 for a header that cannot be read, 403 for an instance that is
   * not allowed; no instance is sent anything then.
   */
  of(headers: IncomingHttpHeaders, requestId: string): readonly PooledInstance[] {
    const value = headers[PREFILLER_HEADER];
    // Node joins the values of several headers with commas.
    const text = typeof value === "string" ? value.trim() : "";
    if (text === "") return [];
    const names = text.split(",", MAX_NAMED + 1).map((name) => name.trim());
    if (names.length > MAX_NAMED) throw tooManyNamed();
    const specs = names.map((name) => this.#allowed(name, requestId));
    const instances = new Set(specs.map((spec) => this.#instance(spec)));
    this.#forgetUnused();
    return [...instances];
  }

  /** Stops following the discovery. */
  close(): void {
    this.#watch?.close();
  }

  #allowed(name: string, requestId: string): InstanceSpec {
    const { tls, kv, log } = this.#options;
    const spec = parsedSpec(name, tls);
    const found = this.#found.get(instanceName(spec));
    if (found !== undefined) return found;
    if (this.#allowlist.allows(spec.url)) return { ...spec, kv };
    log.warn("prefiller-refused", { requestId, prefiller: shortened(name) });
    throw new KvError(
      "KV_REQUEST_INVALID",
      `${PREFILLER_HEADER} names an instance that is not allowed here`,
      {
        hint: "the sidecar's log names it; --allow-prefill, or a discovery, says which instances are allowed",
        details: { httpStatus: 403, param: PREFILLER_HEADER, limit: "sidecar.allow" },
      },
    );
  }

  #instance(spec: InstanceSpec): PooledInstance {
    const { pool, clock } = this.#options;
    let instance = pool.find(spec);
    // One that is being forgotten is wanted again.
    if (instance === undefined || (instance.draining && !this.#namedAtMs.has(instance))) {
      pool.add(spec);
      instance = pool.find(spec) as PooledInstance;
    }
    this.#namedAtMs.delete(instance);
    this.#namedAtMs.set(instance, clock.now());
    return instance;
  }

  #forgetUnused(): void {
    const { pool, clock } = this.#options;
    const sinceMs = clock.now() - REMEMBERED_MS;
    for (const [instance, atMs] of this.#namedAtMs) {
      if (atMs > sinceMs && this.#namedAtMs.size <= MAX_REMEMBERED) return;
      this.#namedAtMs.delete(instance);
      // One that an operator has removed is not there any more.
      if (pool.find(instance) === instance) void pool.remove(instance);
    }
  }
}

function withTls(spec: InstanceSpec): InstanceSpec {
  return { ...spec, url: spec.url.replace(/^http:/, "https:") };
}

function parsedSpec(name: string, tls: boolean): InstanceSpec {
  if (!HOST_PORT.test(name)) throw invalidName(name);
  try {
    return parseInstanceSpec(tls ? `https://${name}` : name);
  } catch (cause) {
    throw invalidName(name, cause);
  }
}

function invalidName(name: string, cause?: unknown): KvError {
  return new KvError(
    "KV_REQUEST_INVALID",
    `${PREFILLER_HEADER} names "${shortened(name)}", which is not host:port`,
    {
      hint: "give host:port, several separated by commas; an IPv6 address in brackets",
      details: { param: PREFILLER_HEADER },
      cause,
    },
  );
}

function tooManyNamed(): KvError {
  return new KvError(
    "KV_REQUEST_INVALID",
    `${PREFILLER_HEADER} names more than ${MAX_NAMED} instances`,
    {
      hint: "name those to try, the best one first",
      details: { param: PREFILLER_HEADER, limit: `instances in ${PREFILLER_HEADER}` },
    },
  );
}
