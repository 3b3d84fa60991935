import type { InstancePool, InstanceStatus, Role } from "@kv/fleet";
import {
  AdminServer,
  changeInstance,
  Fleet,
  type FleetStatus,
  type FrontEndOptions,
  type InstanceChange,
  invalidConfig,
  KeptObjects,
  type MeasuredSignals,
  type MetricAsJson,
  type PinnedStatus,
  type Reloaded,
  reloadedSettings,
} from "@kv/fleet/front-end";
import { Certificate, httpUrl } from "@kv/http";
import { KvError, type Log } from "@kv/interface";
import { type ProxySettings, type ProxySettingsInput, readSettings } from "./config/settings.js";
import { unusedSettings } from "./config/unused-settings.js";
import { Generation } from "./flow/generation.js";
import { RequestLives } from "./http/request-lives.js";
import { type ResolvedLimits, resolveLimits } from "./http/resolved-limits.js";
import { ClientServer } from "./http/server.js";
import { Legs } from "./legs/legs.js";
import type { ObjectStore } from "./readback/object-store.js";
import { NamedPrefillers } from "./sidecar/named-prefillers.js";
import type { RequestCountsStatus, RequestSummary } from "./telemetry/request-record.js";

/** Options of `createProxy`: settings and what a program may pass in. */
export interface ProxyOptions extends ProxySettingsInput, FrontEndOptions {}

/** The proxy's state as JSON, for `/status`. */
export interface ProxyStatus extends FleetStatus {
  /**
   * Disaggregation strategy: `pull`, `push`, `push, prefill first` or `auto`, after `sidecar, ` for
   * a sidecar.
   */
  readonly flow: string;
  /** Seconds since the proxy was created. */
  readonly uptime_s: number;
  /** Blocks of ended turns at decode instances; null where `readback` is off. */
  readonly readback: readonly PinnedStatus[] | null;
  readonly requests: RequestCountsStatus;
}

/** Where the proxy listens. */
export interface ProxyAddress {
  readonly host: string;
  /** The port that was taken, also for port 0. */
  readonly port: number;
  /** `http://HOST:PORT`, or `https://` for a sidecar with TLS. */
  readonly url: string;
  /** Undefined where the settings have no admin routes. */
  readonly adminUrl?: string | undefined;
}

/** A prefill/decode router. */
export interface Proxy {
  /**
   * Serves clients, by default on 127.0.0.1:8000. Port 0 takes a free port.
   * @throws `KV_CONFIG_INVALID` when the port is taken or the host is not of this machine.
   */
  listen(options?: { host?: string | undefined; port?: number | undefined }): Promise<ProxyAddress>;
  status(): ProxyStatus;
  /**
   * Takes settings in place of those that the proxy was created with. Instances, routing and most
   * limits change at once; requests in flight go on. Returns what changed, and what needs a restart.
   * @throws As `createProxy`; then nothing has changed.
   */
  reload(settings: ProxySettingsInput): Reloaded;
  /** Both roles' instances, which a program may add, drain and remove. */
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /**
   * Refuses further requests (503) and aborts those in flight after `graceMs` (default:
   * `timeouts.graceMs`). A second call may shorten the grace.
   */
  close(options?: { graceMs?: number | undefined }): Promise<void>;
  /** `close` with the default grace. */
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * Creates a prefill/decode router in front of OpenAI-style servers.
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`.
 */
export function createProxy(options: ProxyOptions): Proxy {
  return new PrefillDecodeProxy(options);
}

/** Valid from this file in `src` and from the bundle in `dist`. */
export const PAGE = new URL("../page/index.html", import.meta.url);

/** Each worker of a port shows and changes the state of all. */
export interface SharedByWorkers {
  status(): Promise<ProxyStatus>;
  changeInstance(change: InstanceChange, body: unknown): Promise<object>;
  readonly objects: ObjectStore;
}

export interface WorkerReport {
  readonly status: ProxyStatus;
  readonly measured: MeasuredSignals;
  /** The last ended requests, oldest first. */
  readonly requests: readonly RequestSummary[];
  /** Oldest first. */
  readonly running: readonly RequestSummary[];
}

export class PrefillDecodeProxy implements Proxy {
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /** Parts that may change without a restart are read at each use. */
  readonly #settings: ProxySettings;
  readonly #limits: ResolvedLimits;
  readonly #fleet: Fleet;
  readonly #legs: Legs;
  readonly #generation: Generation;
  readonly #lives: RequestLives;
  readonly #named: NamedPrefillers | undefined;
  readonly #certificate: Certificate | undefined;
  readonly #server: ClientServer;
  readonly #admin: AdminServer | undefined;
  /** Undefined where several processes serve the port. */
  readonly #objects: KeptObjects | undefined;
  readonly #startedAtMs: number;
  /** A custom routing strategy may read any setting. */
  readonly #warnsOfUnused: boolean;
  #closing: Promise<void> | undefined;

  constructor(options: ProxyOptions, shared?: SharedByWorkers) {
    const { clock, random, log, metrics, tracer, createRouting, createDiscovery, ...input } =
      options;
    const settings = readSettings(input);
    this.#settings = settings;
    const { sidecar, admin } = settings;
    requireSidecarAllows(settings, createDiscovery);
    const namesPrefillers = sidecar !== undefined;
    const fleet = new Fleet({ ...options, settings, namesPrefillers });
    this.#fleet = fleet;
    this.instances = fleet.pools;
    const { ambient } = fleet;
    this.#startedAtMs = ambient.clock.now();
    this.#warnsOfUnused = createRouting === undefined;
    this.#warnOfUnused(input, settings);
    const legs = new Legs(fleet, settings);
    this.#legs = legs;
    if (settings.readback !== undefined && shared === undefined) {
      const own = new KeptObjects({ clock: ambient.clock, ttlMs: settings.readback.ttlMs });
      this.#objects = own;
      fleet.prometheus.addPinned(() => own.status());
    }
    if (sidecar !== undefined) this.#named = new NamedPrefillers(fleet, sidecar);
    this.#generation = new Generation(legs, shared?.objects ?? this.#objects, this.#named);
    warnOfOpenDoors(settings, ambient.log);
    const tls = sidecar?.tls ?? false;
    this.#certificate =
      tls === false ? undefined : new Certificate(tls, { commonName: "kv-proxy", ...ambient });
    const limits = resolveLimits(settings);
    this.#limits = limits;
    const lives = new RequestLives(fleet, settings, limits);
    this.#lives = lives;
    const changeHere = (change: InstanceChange, body: unknown) => this.changeInstance(change, body);
    this.#server = new ClientServer({
      legs,
      limits,
      changeInstance: shared?.changeInstance ?? changeHere,
      lives,
      generation: this.#generation,
      certificate: this.#certificate,
      status: async () => {
        const status = (await shared?.status()) ?? this.status();
        const shown = settings.exposeInstances ? status : withoutInstances(status);
        return { ...shown, ...this.#demoStatus(status) };
      },
    });
    if (admin === undefined) return;
    const page = {
      file: PAGE,
      requests: () => lives.history.list(),
      running: () => lives.history.running(),
      subscribe: (listener: (summary: object) => void) => lives.history.subscribe(listener),
    };
    this.#admin = new AdminServer({
      settings: admin,
      clock: ambient.clock,
      operations: {
        status: () => this.status(),
        metrics: fleet.prometheus,
        changeInstance: changeHere,
        page,
      },
    });
  }

  reload(input: ProxySettingsInput): Reloaded {
    const next = readSettings(input);
    const reloaded = reloadedSettings(this.#settings, next, takesEffect);
    this.#fleet.reload(next);

    const limits: Record<string, unknown> = this.#settings.limits;
    const given: Readonly<Record<string, unknown>> = next.limits;
    // A limit that is no longer given has its default again.
    for (const name of new Set([...Object.keys(limits), ...Object.keys(given)]))
      if (takesEffect(`limits.${name}`)) limits[name] = given[name];
    Object.assign(this.#limits, resolveLimits(this.#settings));
    this.#warnOfUnused(input, next);
    return reloaded;
  }

  #warnOfUnused(input: ProxySettingsInput, settings: ProxySettings): void {
    if (!this.#warnsOfUnused) return;
    for (const unused of unusedSettings(input, settings))
      this.#fleet.ambient.log.warn("setting-unused", { ...unused });
  }

  async listen({
    host = "127.0.0.1",
    port = 8000,
  }: Parameters<Proxy["listen"]>[0] = {}): Promise<ProxyAddress> {
    const { http: server } = this.#server;
    await this.#fleet.firstReadings();
    const listening = await server.listen(host, port);
    const url = httpUrl(host, listening);
    const address = {
      host,
      port: listening,
      url: this.#certificate === undefined ? url : url.replace("http:", "https:"),
    };
    try {
      return { ...address, adminUrl: await this.#admin?.listen() };
    } catch (error) {
      // Without admin routes the proxy could not be observed or changed.
      await server.close();
      throw error;
    }
  }

  status(): ProxyStatus {
    return {
      flow: this.#generation.flow,
      ...this.#fleet.status(),
      uptime_s: (this.#fleet.ambient.clock.now() - this.#startedAtMs) / 1000,
      requests: this.#lives.counts.status(),
      readback: this.#objects?.status() ?? null,
    };
  }

  /** The status members of vLLM's demo proxies. */
  #demoStatus({ prefillers, decoders }: ProxyStatus): object {
    const { mode, exposeInstances } = this.#settings;
    const nodes = (instances: readonly InstanceStatus[]) =>
      instances.map(({ url }) => new URL(url).host);
    const kv = this.instances.prefill.list()[0]?.kv;
    return {
      mode,
      prefill_node_count: prefillers.length,
      decode_node_count: decoders.length,
      ...(exposeInstances && { prefill_nodes: nodes(prefillers), decode_nodes: nodes(decoders) }),
      ...(exposeInstances &&
        mode === "push" && {
          prefill_engine_id: kv?.engineId ?? null,
          prefill_kv_host: kv?.host ?? null,
          prefill_side_channel_port: kv?.port ?? null,
          prefill_tp_size: kv?.tpSize ?? null,
          prefill_pp_size: kv?.ppSize ?? null,
        }),
    };
  }

  report(): WorkerReport {
    return {
      status: this.status(),
      measured: this.#fleet.signals.measured(),
      requests: this.#lives.history.list(),
      running: this.#lives.history.running(),
    };
  }

  metricsAsJson(): Promise<MetricAsJson[]> {
    return this.#fleet.prometheus.json();
  }

  changeInstance(change: InstanceChange, body: unknown): Promise<InstanceStatus[]> {
    const { health, model } = this.#settings;
    const { pools, get } = this.#fleet;
    return changeInstance(change, body, { pools, get, timeoutMs: health.timeoutMs, model });
  }

  async close({
    graceMs = this.#settings.timeouts.graceMs,
  }: Parameters<Proxy["close"]>[0] = {}): Promise<void> {
    this.#fleet.isDraining = true;
    const timer = this.#fleet.ambient.clock.setTimer(() => this.#abortRequests(), graceMs);
    this.#closing ??= this.#closeAll();
    await this.#closing.finally(() => timer.cancel());
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #abortRequests(): void {
    this.#lives.abortAll(closingError("the proxy is closing, and the grace period is over"));
    // Clients with unfinished requests keep their connections; Node stops checking them once the
    // server closes.
    void this.#lives.idle().then(() => this.#server.http.endConnections());
  }

  async #closeAll(): Promise<void> {
    this.#lives.refuse(closingError("the proxy is closing"));
    this.#named?.close();
    this.#fleet.stop();
    await this.#lives.idle();
    await this.#legs.settled();
    await this.#generation.close();
    await this.#server.http.close(Number.POSITIVE_INFINITY);
    this.#certificate?.close();
    await this.#admin?.close();
    await this.#fleet.close();
  }
}

/** Limits that servers and watches are made with. */
const LIMITS_AT_START = ["headersLengthBytes", "clientHeader", "abandonedPrefillMs"] as const;

const takesEffect = (name: string): boolean =>
  /^(prefillers|decoders|routing|limits)(\.|$)/.test(name) &&
  !LIMITS_AT_START.some((limit) => name === `limits.${limit}`);

/** Clients see how many instances there are, not where. */
function withoutInstances({ prefillers, decoders, ...rest }: ProxyStatus): object {
  const counted = (instances: readonly InstanceStatus[]) => ({
    count: instances.length,
    available: instances.filter(({ available }) => available).length,
    unpaired: instances.filter(({ pairing }) => pairing?.state === "unpaired").length,
  });
  return { ...rest, prefillers: counted(prefillers), decoders: counted(decoders) };
}

/**
 * A sidecar must allow some of the prefill instances that requests name.
 * @throws `KV_CONFIG_INVALID` where none could be.
 */
function requireSidecarAllows(
  { sidecar, discovery }: ProxySettings,
  createDiscovery: unknown,
): void {
  if (sidecar === undefined || sidecar.allow.length > 0) return;
  if (discovery !== undefined || createDiscovery !== undefined) return;
  const message =
    "sidecar.allow is empty, and there is no discovery: requests could name no prefill instance";
  throw invalidConfig(
    message,
    "give --allow-prefill with addresses, blocks such as 10.0.0.0/8 or names; * allows every host",
  );
}

function warnOfOpenDoors({ sidecar, instanceRoutes }: ProxySettings, log: Log): void {
  if (sidecar?.allow.some((entry) => /^\*(:|$)/.test(entry.trim())) === true)
    log.warn("prefillers-not-restricted", {
      hint: "whoever can set x-prefiller-host-port makes the sidecar send requests to any host: name blocks or names in --allow-prefill",
    });
  if (instanceRoutes !== undefined && instanceRoutes.token === undefined)
    log.warn("instance-routes-without-token", {
      hint: "whoever reaches the clients' port can add instances, which get requests: set a token",
    });
}

function closingError(message: string): KvError {
  return new KvError("KV_REQUEST_ABORTED", message, {
    hint: "send it to another proxy",
    details: { httpStatus: 503 },
  });
}
