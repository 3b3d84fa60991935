import type { Discovery, InstancePool, InstanceStatus, Role, Routing } from "@kv/fleet";
import {
  AutoscalingSignals,
  bothMetrics,
  Fleet,
  type MetricAsJson,
  PrometheusMetrics,
  type SignalsStatus,
} from "@kv/fleet/front-end";
import { Certificate, RequestsInFlight, YieldingQueue } from "@kv/http";
import {
  type Ambient,
  type Clock,
  KvError,
  type Log,
  type Metrics,
  type Random,
  silentLog,
  systemClock,
  systemRandom,
  type Tracer,
} from "@kv/interface";
import { type ProxySettings, type ProxySettingsInput, readSettings } from "./config/settings.js";
import { unusedSettings } from "./config/unused-settings.js";
import { createStrategy } from "./flow/create-strategy.js";
import { GenerationFlow } from "./flow/generation-flow.js";
import { Legs } from "./flow/legs.js";
import { AdminServer } from "./http/admin-server.js";
import { DecodeRoute } from "./http/decode-route.js";
import { GenerationRoute } from "./http/generation-route.js";
import { changeInstance, type InstanceChange } from "./http/instance-changes.js";
import { AbandonedPrefills } from "./http/limits/abandoned-prefills.js";
import { resolveLimits } from "./http/limits/resolved-limits.js";
import { ClientServer } from "./http/server.js";
import { NamedPrefillers } from "./sidecar/named-prefillers.js";
import { RequestCounts, type RequestCountsStatus } from "./telemetry/request-counts.js";
import { RequestHistory } from "./telemetry/request-history.js";
import type { WorkerReport } from "./workers/worker-report.js";

/** Options of `createProxy`: the settings, and what a program may pass in. */
export interface ProxyOptions extends ProxySettingsInput {
  /** Source of time. @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Randomness for ids and routing. @default systemRandom() */
  readonly random?: Random | undefined;
  /** Gets the events. @default silentLog */
  readonly log?: Log | undefined;
  /** Receives all metrics, besides the admin route `/metrics`. @default undefined */
  readonly metrics?: Metrics | undefined;
  /** Records a span for each request and each leg. Trace headers of clients pass unchanged then. @default undefined */
  readonly tracer?: Tracer | undefined;
  /** Creates the routing strategy of each role, which the proxy closes. @default the setting `routing` names it */
  readonly createRouting?: ((role: Role) => Routing) | undefined;
  /** Creates a source of instances, besides the settings' lists. @default the setting `discovery` names it */
  readonly createDiscovery?: (() => Discovery) | undefined;
}

/** The state of the proxy as JSON, for `/status`. */
export interface ProxyStatus {
  /** Name of the disaggregation strategy: `pull`, `push`, `push, prefill first` or `auto`; of a sidecar with `sidecar, ` before it. */
  readonly flow: string;
  /** Name of the routing strategy of the decode instances. */
  readonly routing: string;
  /** True from the call of `close`. */
  readonly draining: boolean;
  /** Seconds since the proxy was created. */
  readonly uptime_s: number;
  /** Counts of requests. */
  readonly requests: RequestCountsStatus;
  /** Signals for autoscalers. */
  readonly signals: SignalsStatus;
  /** The prefill instances. */
  readonly prefillers: readonly InstanceStatus[];
  /** The decode instances. */
  readonly decoders: readonly InstanceStatus[];
}

/** Where the proxy listens. */
export interface ProxyAddress {
  /** The host that was passed to `listen`. */
  readonly host: string;
  /** The port, also where a free one was taken. */
  readonly port: number;
  /** `http://HOST:PORT`, of a sidecar with TLS `https://HOST:PORT`. */
  readonly url: string;
  /** URL of the admin routes; undefined where the settings have none. */
  readonly adminUrl?: string | undefined;
}

/** A prefill/decode router. */
export interface Proxy {
  /**
   * Starts to serve clients, on 127.0.0.1 and port 8000 by default; port 0 takes a free one. Errors: `KV_CONFIG_INVALID` when a port is taken or the
   * host is not of this machine.
   */
  listen(options?: { host?: string | undefined; port?: number | undefined }): Promise<ProxyAddress>;
  /** The present state. */
  status(): ProxyStatus;
  /** The instances of both roles, for a program that adds, drains and removes them. */
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /**
   * Refuses further requests (503), lets those in flight end within `graceMs` (default: the setting `timeouts.graceMs`), then aborts the rest. It may be
   * called again, with a shorter grace.
   */
  close(options?: { graceMs?: number | undefined }): Promise<void>;
  /** `close` with the default grace. */
  [Symbol.asyncDispose](): Promise<void>;
}

/** Creates a prefill/decode router in front of OpenAI-style servers. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`. */
export function createProxy(options: ProxyOptions): Proxy {
  return new PrefillDecodeProxy(options);
}

/** Relative to this file in `src` and to the bundle in `dist`. */
export const PAGE = new URL("../page/index.html", import.meta.url);

/** What the workers behind one port share: in each of them, the routes for clients show and change all. */
export interface SharedByWorkers {
  /** The state of all workers. */
  status(): Promise<ProxyStatus>;
  /** Changes an instance in all workers. */
  changeInstance(change: InstanceChange, body: unknown): Promise<object>;
}

/** The proxy of one process. */
export class PrefillDecodeProxy implements Proxy {
  readonly instances: Readonly<Record<Role, InstancePool>>;
  readonly #settings: ProxySettings;
  readonly #ambient: Ambient;
  readonly #fleet: Fleet;
  readonly #flow: GenerationFlow;
  readonly #generation: GenerationRoute;
  readonly #counts = new RequestCounts();
  readonly #history: RequestHistory;
  readonly #prometheus: PrometheusMetrics;
  readonly #signals: AutoscalingSignals;
  /** Of a sidecar. */
  readonly #named: NamedPrefillers | undefined;
  /** Of a sidecar that speaks TLS. */
  readonly #certificate: Certificate | undefined;
  readonly #server: ClientServer;
  readonly #admin: AdminServer | undefined;
  readonly #startedAtMs: number;
  #closing: Promise<void> | undefined = undefined;

  /** `shared`: of a worker, the processes beside it. */
  constructor(options: ProxyOptions, shared?: SharedByWorkers) {
    const { clock, random, log, metrics, tracer, createRouting, createDiscovery, ...input } = options;
    const settings = readSettings(input);
    this.#settings = settings;
    const { timeouts } = settings;
    const own = {
      clock: clock ?? systemClock(),
      random: random ?? systemRandom(),
      log: log ?? silentLog,
      tracer,
    };
    this.#startedAtMs = own.clock.now();
    requireSidecarAllows(settings, createDiscovery);
    // A routing strategy that is passed in may read any setting.
    if (createRouting === undefined)
      for (const unused of unusedSettings(input, settings)) own.log.warn("setting-unused", { ...unused });

    const { sidecar } = settings;
    const fleet = new Fleet({
      settings,
      ...own,
      createRouting,
      createDiscovery,
      namesPrefillers: sidecar !== undefined,
    });
    this.#fleet = fleet;
    const { pairing, upstream, discovery } = fleet;
    this.instances = fleet.pools;
    const { prefill: prefillers, decode: decoders } = fleet.pools;

    const prometheus = new PrometheusMetrics([prefillers, decoders]);
    this.#prometheus = prometheus;
    const ambient: Ambient = {
      ...own,
      metrics: metrics === undefined ? prometheus : bothMetrics(metrics, prometheus),
    };
    this.#ambient = ambient;
    const signals = new AutoscalingSignals({ prefillers, decoders, pairing, clock: own.clock });
    this.#signals = signals;
    prometheus.addSignals(() => signals.status());
    if (discovery !== undefined) prometheus.addDiscovery(discovery);
    const legs = new Legs({ prefillers, decoders, pairing, upstream, settings, signals, ambient });
    // One for all: together, long bodies take at most a quarter of the time.
    const parses = new YieldingQueue({ clock: own.clock });
    this.#flow = new GenerationFlow(legs, createStrategy(settings, legs), parses);
    const history = new RequestHistory(own.clock);
    this.#history = history;
    if (sidecar !== undefined) {
      const { allow, prefillTls: tls, kv } = sidecar;
      this.#named = new NamedPrefillers({ pool: prefillers, allow, discovery, tls, kv, ...own });
      if (allow.some((entry) => /^\*(:|$)/.test(entry.trim())))
        own.log.warn("prefillers-not-restricted", {
          hint: "whoever can set x-prefiller-host-port makes the sidecar send requests to any host: name blocks or names in --allow-prefill",
        });
    }
    const tls = sidecar?.tls ?? false;
    this.#certificate = tls === false ? undefined : new Certificate(tls, { commonName: "kv-proxy", ...own });
    const limits = resolveLimits(settings);
    const inFlight = new RequestsInFlight({
      all: limits.requestsInFlight,
      perClient: limits.requestsPerClient,
    });
    this.#generation = new GenerationRoute({
      ambient,
      flow: this.#flow,
      counts: this.#counts,
      history,
      inFlight,
      parses,
      namedPrefillers: this.#named,
      abandoned: new AbandonedPrefills({
        clock: own.clock,
        limit: limits.abandonedPrefills,
        windowMs: timeouts.abandonedWindowMs,
      }),
      settings,
    });
    const changeHere = (change: InstanceChange, body: unknown) => this.changeInstance(change, body);
    this.#server = new ClientServer({
      ambient,
      settings,
      limits,
      parses,
      changeInstance: shared?.changeInstance ?? changeHere,
      generation: this.#generation,
      decodeRoute: new DecodeRoute({ decoders, upstream, settings, inFlight, ambient }),
      certificate: this.#certificate,
      health: () => this.#healthStatus(),
      status: async () => {
        const status = (await shared?.status()) ?? this.status();
        return settings.exposeInstances ? status : withoutInstances(status);
      },
    });
    if (settings.instanceRoutes !== undefined && settings.instanceRoutes.token === undefined) {
      const hint = "whoever reaches the clients' port can add instances, which get requests: set a token";
      own.log.warn("instance-routes-without-token", { hint });
    }
    const { admin } = settings;
    this.#admin =
      admin === undefined
        ? undefined
        : new AdminServer({
            settings: admin,
            page: PAGE,
            clock: own.clock,
            operations: {
              status: () => this.status(),
              requests: () => history.list(),
              subscribe: (listener) => history.subscribe(listener),
              metrics: async () => ({
                contentType: prometheus.contentType,
                text: await prometheus.text(),
              }),
              changeInstance: changeHere,
            },
          });
  }

  async listen({
    host = "127.0.0.1",
    port = 8000,
  }: {
    host?: string | undefined;
    port?: number | undefined;
  } = {}): Promise<ProxyAddress> {
    const { http: server } = this.#server;
    await this.#fleet.firstReadings();
    const listening = await server.listen(host, port);
    const url = httpUrl(host, listening);
    const address = {
      host,
      port: listening,
      url: this.#certificate === undefined ? url : url.replace("http:", "https:"),
    };
    const { admin } = this.#settings;
    if (admin === undefined || this.#admin === undefined) return address;
    try {
      const adminPort = await this.#admin.listen(admin.host, admin.port);
      return { ...address, adminUrl: httpUrl(admin.host, adminPort) };
    } catch (error) {
      // Without its admin routes, the proxy would serve clients and could not be observed or changed.
      await server.close();
      throw error;
    }
  }

  status(): ProxyStatus {
    const { prefill, decode } = this.instances;
    return {
      flow: this.#named === undefined ? this.#flow.name : `sidecar, ${this.#flow.name}`,
      routing: decode.routing,
      draining: this.#server.isDraining,
      uptime_s: (this.#ambient.clock.now() - this.#startedAtMs) / 1000,
      requests: this.#counts.status(),
      signals: this.#signals.status(),
      prefillers: prefill.status(),
      decoders: decode.status(),
    };
  }

  /** What the primary of several workers merges. */
  report(): WorkerReport {
    return {
      status: this.status(),
      measured: this.#signals.measured(),
      requests: this.#history.list(),
    };
  }

  /** The metrics, for the primary of several workers. */
  metricsAsJson(): Promise<MetricAsJson[]> {
    return this.#prometheus.json();
  }

  /** As the function `changeInstance`. */
  changeInstance(change: InstanceChange, body: unknown): Promise<object> {
    return changeInstance(change, body, this.instances);
  }

  async close({
    graceMs = this.#settings.timeouts.graceMs,
  }: {
    graceMs?: number | undefined;
  } = {}): Promise<void> {
    this.#server.isDraining = true;
    const timer = this.#ambient.clock.setTimer(() => this.#abortRequests(), graceMs);
    this.#closing ??= this.#closeAll();
    await this.#closing.finally(() => timer.cancel());
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #healthStatus() {
    const { ok: isHealthy, ...instances } = await this.#fleet.health();
    const ok = isHealthy && !this.#server.isDraining;
    return { ok, body: { status: ok ? "ok" : "unavailable", ...instances } };
  }

  #abortRequests(): void {
    this.#generation.abortAll(closingError("the proxy is closing, and the grace period is over"));
    // Clients that have not sent their whole request keep their connections; Node's own check for them ends when the server begins to close.
    void this.#generation.idle().then(() => this.#server.http.endConnections());
  }

  async #closeAll(): Promise<void> {
    this.#generation.refuse(closingError("the proxy is closing"));
    this.#named?.close();
    this.#fleet.stop();
    await this.#generation.idle();
    await this.#flow.settled();
    await this.#server.http.close(Number.POSITIVE_INFINITY);
    this.#certificate?.close();
    await this.#admin?.close();
    await this.#fleet.close();
  }
}

/** The status for clients: how many instances there are, and not where. */
function withoutInstances({ prefillers, decoders, ...rest }: ProxyStatus): object {
  const counted = (instances: readonly InstanceStatus[]) => ({
    count: instances.length,
    available: instances.filter(({ available }) => available).length,
    unpaired: instances.filter(({ pairing }) => pairing?.state === "unpaired").length,
  });
  return { ...rest, prefillers: counted(prefillers), decoders: counted(decoders) };
}

/** Requests name the prefill instances of a sidecar; each must be allowed. Errors: `KV_CONFIG_INVALID` where none could be. */
function requireSidecarAllows({ sidecar, discovery }: ProxySettings, createDiscovery: unknown): void {
  if (sidecar === undefined || sidecar.allow.length > 0) return;
  if (discovery !== undefined || createDiscovery !== undefined) return;
  const message =
    "sidecar.allow is empty, and there is no discovery: requests could name no prefill instance";
  throw new KvError("KV_CONFIG_INVALID", message, {
    hint: "give --allow-prefill with addresses, blocks such as 10.0.0.0/8 or names; * allows every host",
  });
}

function closingError(message: string): KvError {
  return new KvError("KV_REQUEST_ABORTED", message, {
    hint: "send it to another proxy",
    details: { httpStatus: 503 },
  });
}

/** `http://HOST:PORT`, also of an IPv6 address. */
export function httpUrl(host: string, port: number): string {
  return `http://${host.includes(":") ? `[${host}]` : host}:${port}`;
}
