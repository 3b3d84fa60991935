import type { IncomingHttpHeaders } from "node:http";
import type { Socket } from "node:net";
import {
  type InstancePool,
  type InstanceSpec,
  instanceName,
  type PooledInstance,
  parseInstanceSpec,
} from "@kv/fleet";
import {
  addressOf,
  type Fleet,
  KV_SOURCE_HEADER,
  PREFILLER_HEADER,
  remoteKvSource,
} from "@kv/fleet/front-end";
import { shortened } from "@kv/http";
import { type Ambient, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { Allowlist } from "./allowlist.js";

export const MAX_NAMED = 16;
const REMEMBERED_MS = 600_000;
/** Each remembered instance costs side-channel reads and metrics. */
const MAX_REMEMBERED = 1024;

const HOST_PORT = /^(\[[0-9a-f:.]+\]|[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?):[0-9]{1,5}(@[0-9]{1,5})?$/i;

type SidecarSettings = NonNullable<ProxySettings["sidecar"]>;

/**
 * Prefill instances that request headers name. Headers decide where this process sends requests, so
 * each instance must be on the allowlist or discovered. The pool forgets an instance ten minutes
 * after its last naming.
 */
export class NamedPrefillers {
  readonly #pool: InstancePool;
  readonly #ambient: Ambient;
  readonly #allowlist: Allowlist;
  #found: ReadonlyMap<string, InstanceSpec> = new Map();
  #foundHosts: ReadonlySet<string> = new Set();
  readonly #watch: { close(): void } | undefined;
  /** Warned once about a header that is never read. */
  #hasWarned = false;
  /** When each was named last, earliest first. */
  readonly #namedAtMs = new Map<PooledInstance, number>();

  /** @throws `KV_CONFIG_INVALID` for an entry of the allowlist that cannot be read. */
  constructor(
    { pools, discovery, ambient }: Fleet,
    private readonly settings: SidecarSettings,
  ) {
    this.#pool = pools.prefill;
    this.#ambient = ambient;
    this.#allowlist = new Allowlist(settings.allow);
    this.#watch = discovery?.watch(
      ({ prefillers, decoders }) => {
        const specs = settings.prefillTls ? prefillers.map(withTls) : prefillers;
        this.#found = new Map(specs.map((spec) => [instanceName(spec), spec]));
        this.#foundHosts = new Set([...prefillers, ...decoders].map(({ url }) => addressOf(url)));
      },
      (error) => ambient.log.warn("discovery-failed", { by: discovery.name, error }),
    );
  }

  /**
   * In the header's order; empty where the request names none.
   * @throws `KV_REQUEST_INVALID`, before any request is sent: 400 for an unreadable header, 403 for
   * an instance that is not allowed.
   */
  of(headers: IncomingHttpHeaders, requestId: string): readonly PooledInstance[] {
    const value = headers[PREFILLER_HEADER];
    // Node joins repeated headers with commas.
    const text = typeof value === "string" ? value.trim() : "";
    if (text === "") return [];
    const names = text.split(",", MAX_NAMED + 1).map((name) => name.trim());
    if (names.length > MAX_NAMED)
      throw invalidHeader(
        `names more than ${MAX_NAMED} instances`,
        "name those to try, the best one first",
        { limit: `instances in ${PREFILLER_HEADER}` },
      );
    const specs = names.map((name) => this.#allowed(name, requestId));
    const instances = new Set(specs.map((spec) => this.#instance(spec)));
    this.#forgetUnused();
    return [...instances];
  }

  /**
   * An unusable source, or this instance itself, is logged and ignored; the prompt is then
   * computed. Requests name this instance by the local address of `socket`.
   */
  kvSource(
    headers: IncomingHttpHeaders,
    requestId: string,
    prefillers: readonly PooledInstance[] = [],
    socket: Socket,
  ): (() => string) | undefined {
    const value = headers[KV_SOURCE_HEADER];
    const source = typeof value === "string" ? value.trim() : "";
    if (source === "") return undefined;
    const { log, random } = this.#ambient;
    const settings = this.settings;
    const why = this.#whyNoSource(source);
    if (why !== undefined) {
      if (settings.p2pPull || !this.#hasWarned)
        log.warn("kv-source-ignored", { requestId, source: shortened(source), why });
      this.#hasWarned = true;
      return undefined;
    }
    const own = socket.localAddress?.replace(/^::ffff:/, "") ?? "";
    const computing =
      prefillers.length > 0
        ? prefillers.map(({ url }) => addressOf(url))
        : [addressOf(`http://${own.includes(":") ? `[${own}]` : own}:${socket.localPort}`)];
    const url = `http://${source}`;
    if (computing.includes(addressOf(url))) return undefined;
    const { hostname, port } = new URL(url);
    const remotePort = settings.kvPools.includes(source)
      ? Number(port)
      : settings.p2pConnectorPort + rankOf(Number(port), settings.ranks);
    // The id is the reading engine's, which may run several legs of one request.
    return () => remoteKvSource(`${hostname}:${remotePort}`, random);
  }

  close(): void {
    this.#watch?.close();
  }

  #whyNoSource(source: string): string | undefined {
    if (!this.settings.p2pPull) return "--enable-p2p-pull is not given";
    if (!HOST_PORT.test(source) || source.includes("@") || !URL.canParse(`http://${source}`))
      return "it is not host:port";
    const url = `http://${source}`;
    const isAllowed =
      this.settings.kvPools.includes(source) ||
      this.#foundHosts.has(addressOf(url)) ||
      this.#allowlist.allows(url);
    return isAllowed ? undefined : "it is not allowed here";
  }

  #allowed(name: string, requestId: string): InstanceSpec {
    const { prefillTls, kv } = this.settings;
    const spec = parsedSpec(name, prefillTls);
    const found = this.#found.get(instanceName(spec));
    if (found !== undefined) return found;
    if (this.#allowlist.allows(spec.url)) return { ...spec, kv };
    this.#ambient.log.warn("prefiller-refused", { requestId, prefiller: shortened(name) });
    throw invalidHeader(
      "names an instance that is not allowed here",
      "the sidecar's log names it; --allow-prefill, or a discovery, says which instances are allowed",
      { httpStatus: 403, limit: "sidecar.allow" },
    );
  }

  #instance(spec: InstanceSpec): PooledInstance {
    const pool = this.#pool;
    let instance = pool.find(spec);
    // The instance was being forgotten and is wanted again.
    if (instance === undefined || (instance.draining && !this.#namedAtMs.has(instance))) {
      pool.add(spec);
      instance = pool.find(spec) as PooledInstance;
    }
    this.#namedAtMs.delete(instance);
    this.#namedAtMs.set(instance, this.#ambient.clock.now());
    return instance;
  }

  #forgetUnused(): void {
    const pool = this.#pool;
    const sinceMs = this.#ambient.clock.now() - REMEMBERED_MS;
    for (const [instance, atMs] of this.#namedAtMs) {
      if (atMs > sinceMs && this.#namedAtMs.size <= MAX_REMEMBERED) return;
      this.#namedAtMs.delete(instance);
      // An operator may have removed it.
      if (pool.find(instance) === instance) void pool.remove(instance);
    }
  }
}

/** A port outside the ranks' belongs to a server with one rank. */
function rankOf(port: number, ranks: SidecarSettings["ranks"]): number {
  if (ranks === undefined) return 0;
  const rank = port - ranks.firstPort;
  return rank >= 0 && rank < ranks.count ? rank : 0;
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
  return invalidHeader(
    `names "${shortened(name)}", which is not host:port`,
    "give host:port, several separated by commas; an IPv6 address in brackets",
    {},
    cause,
  );
}

function invalidHeader(what: string, hint: string, details: object, cause?: unknown): KvError {
  return new KvError("KV_REQUEST_INVALID", `${PREFILLER_HEADER} ${what}`, {
    hint,
    details: { param: PREFILLER_HEADER, ...details },
    cause,
  });
}
