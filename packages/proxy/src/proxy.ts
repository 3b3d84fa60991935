import type { InstancePool, InstanceStatus, Role } from "@kv/fleet";
import {
  AdminServer,
  changeInstance,
  Fleet,
  type FleetStatus,
  type FrontEndOptions,
  type InstanceChange,
  KeptObjects,
  type MeasuredSignals,
  type MetricAsJson,
  type PinnedStatus,
} from "@kv/fleet/front-end";
import { Certificate, httpUrl, RequestsInFlight } from "@kv/http";
import { KvError, type Log } from "@kv/interface";
import { type ProxySettings, type ProxySettingsInput, readSettings } from "./config/settings.js";
import { unusedSettings } from "./config/unused-settings.js";
import { createStrategy } from "./flow/create-strategy.js";
import type { DisaggregationStrategy } from "./flow/disaggregation-strategy.js";
import { DecodeRoute } from "./http/decode-route.js";
import { GenerationRoute } from "./http/generation-route.js";
import { resolveLimits } from "./http/limits/resolved-limits.js";
import { ClientServer } from "./http/server.js";
import { Legs } from "./legs/legs.js";
import { type ObjectCall, objectsByCalls } from "./readback/object-store.js";
import { Readback } from "./readback/readback.js";
import { NamedPrefillers } from "./sidecar/named-prefillers.js";
import { RequestCounts, type RequestCountsStatus } from "./telemetry/request-counts.js";
import { RequestHistory, type RequestSummary } from "./telemetry/request-history.js";

/** Options of `createProxy`: the settings, and what a program may pass in. */
export interface ProxyOptions extends ProxySettingsInput, FrontEndOptions {}

/** The state of the proxy as JSON, for `/status`. */
export interface ProxyStatus extends FleetStatus {
  /**
   * Name of the disaggregation strategy: `pull`, `push`, `push, prefill first` or `auto`; of a
   * sidecar with `sidecar, ` before it.
   */
  readonly flow: string;
  /** Seconds since the proxy was created. */
  readonly uptime_s: number;
  /** What ended turns hold at decode instances; null where the setting `readback` is off. */
  readonly readback: readonly PinnedStatus[] | null;
  /** Counts of requests. */
  readonly requests: RequestCountsStatus;
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
   * Starts to serve clients, on 127.0.0.1 and port 8000 by default; port 0 takes a free one.
   * @throws `KV_CONFIG_INVALID` when a port is taken or the host is not of this machine.
   */
  listen(options?: { host?: string | undefined; port?: number | undefined }): Promise<ProxyAddress>;
  /** The present state. */
  status(): ProxyStatus;
  /** The instances of both roles, for a program that adds, drains and removes them. */
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /**
   * Refuses further requests (503), lets those in flight end within `graceMs` (default: the setting
   * `timeouts.graceMs`), then aborts the rest. It may be called again, with a shorter grace.
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

/** Relative to this file in `src` and to the bundle in `dist`. */
export const PAGE = new URL("../page/index.html", import.meta.url);

/**
 * What the workers behind one port share: in each of them, the routes for clients show and change
 * all.
 */
export interface SharedByWorkers {
  /** The state of all workers. */
  status(): Promise<ProxyStatus>;
  /** Changes an instance in all workers. */
  changeInstance(change: InstanceChange, body: unknown): Promise<object>;
  /** Calls a method of the objects that all workers share. */
  objects<T>(call: ObjectCall): Promise<T>;
}

/** The state of one worker. */
export interface WorkerReport {
  readonly status: ProxyStatus;
  readonly measured: MeasuredSignals;
  /** The requests that ended last, oldest first. */
  readonly requests: readonly RequestSummary[];
  /** The requests that run, oldest first. */
  readonly running: readonly RequestSummary[];
}

/** The proxy of one process. */
export class PrefillDecodeProxy implements Proxy {
  readonly instances: Readonly<Record<Role, InstancePool>>;
  readonly #settings: ProxySettings;
  readonly #fleet: Fleet;
  readonly #legs: Legs;
  readonly #strategy: DisaggregationStrategy;
  readonly #generation: GenerationRoute;
  readonly #counts = new RequestCounts();
  readonly #history: RequestHistory;
  /** Of a sidecar. */
  readonly #named: NamedPrefillers | undefined;
  /** Of a sidecar that speaks TLS. */
  readonly #certificate: Certificate | undefined;
  readonly #server: ClientServer;
  readonly #admin: AdminServer | undefined;
  readonly #readback: Readback | undefined;
  /** Of the only process that serves the port. */
  readonly #objects: KeptObjects | undefined;
  readonly #startedAtMs: number;
  #closing: Promise<void> | undefined = undefined;

  /** `shared`: of a worker, the processes beside it. */
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
    // A routing strategy that is passed in may read any setting.
    if (createRouting === undefined)
      for (const unused of unusedSettings(input, settings))
        ambient.log.warn("setting-unused", { ...unused });
    const legs = new Legs(fleet, settings);
    this.#legs = legs;
    if (settings.readback !== undefined) {
      const own = new KeptObjects({ clock: ambient.clock, ttlMs: settings.readback.ttlMs });
      if (shared === undefined) {
        this.#objects = own;
        fleet.prometheus.addPinned(() => own.status());
      }
      const objects = shared === undefined ? own : objectsByCalls((call) => shared.objects(call));
      this.#readback = new Readback(legs, settings.readback, objects);
    }
    const strategy = createStrategy(settings, legs, this.#readback);
    this.#strategy = strategy;
    const history = new RequestHistory(ambient.clock);
    this.#history = history;
    if (sidecar !== undefined) {
      const { allow, prefillTls: tls, kv } = sidecar;
      const { discovery } = fleet;
      this.#named = new NamedPrefillers({
        pool: fleet.pools.prefill,
        allow,
        discovery,
        tls,
        kv,
        ...ambient,
      });
    }
    warnOfOpenDoors(settings, ambient.log);
    const tls = sidecar?.tls ?? false;
    this.#certificate =
      tls === false ? undefined : new Certificate(tls, { commonName: "kv-proxy", ...ambient });
    const limits = resolveLimits(settings);
    const inFlight = new RequestsInFlight({
      all: limits.requestsInFlight,
      perClient: limits.requestsPerClient,
    });
    this.#generation = new GenerationRoute({
      ambient,
      legs,
      strategy,
      counts: this.#counts,
      history,
      inFlight,
      namedPrefillers: this.#named,
      limits,
      settings,
    });
    const changeHere = (change: InstanceChange, body: unknown) => this.changeInstance(change, body);
    this.#server = new ClientServer({
      fleet,
      settings,
      limits,
      changeInstance: shared?.changeInstance ?? changeHere,
      generation: this.#generation,
      decodeRoute: new DecodeRoute({ fleet, settings, inFlight }),
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
      requests: () => history.list(),
      running: () => history.running(),
      subscribe: history.subscribe.bind(history),
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
    try {
      return { ...address, adminUrl: await this.#admin?.listen() };
    } catch (error) {
      // Without its admin routes, the proxy would serve clients and could not be observed or
      // changed.
      await server.close();
      throw error;
    }
  }

  status(): ProxyStatus {
    return {
      flow: this.#named === undefined ? this.#strategy.name : `sidecar, ${this.#strategy.name}`,
      ...this.#fleet.status(),
      uptime_s: (this.#fleet.ambient.clock.now() - this.#startedAtMs) / 1000,
      requests: this.#counts.status(),
      readback: this.#objects?.status() ?? null,
    };
  }

  /** The members that the status of vLLM's demo proxies has, by their names. */
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

  /** What the primary of several workers merges. */
  report(): WorkerReport {
    return {
      status: this.status(),
      measured: this.#fleet.signals.measured(),
      requests: this.#history.list(),
      running: this.#history.running(),
    };
  }

  /** The metrics, for the primary of several workers. */
  metricsAsJson(): Promise<MetricAsJson[]> {
    return this.#fleet.prometheus.json();
  }

  /** As the function `changeInstance`. */
  changeInstance(change: InstanceChange, body: unknown): Promise<object> {
    const { health, model } = this.#settings;
    const { pools, get } = this.#fleet;
    return changeInstance(change, body, { pools, get, timeoutMs: health.timeoutMs, model });
  }

  async close({
    graceMs = this.#settings.timeouts.graceMs,
  }: {
    graceMs?: number | undefined;
  } = {}): Promise<void> {
    this.#fleet.isDraining = true;
    const timer = this.#fleet.ambient.clock.setTimer(() => this.#abortRequests(), graceMs);
    this.#closing ??= this.#closeAll();
    await this.#closing.finally(() => timer.cancel());
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #abortRequests(): void {
    this.#generation.abortAll(closingError("the proxy is closing, and the grace period is over"));
    // Clients that have not sent their whole request keep their connections; Node's own check for
    // them ends when the server begins to close.
    void this.#generation.idle().then(() => this.#server.http.endConnections());
  }

  async #closeAll(): Promise<void> {
    this.#generation.refuse(closingError("the proxy is closing"));
    this.#named?.close();
    this.#fleet.stop();
    await this.#generation.idle();
    await this.#legs.settled();
    await this.#readback?.close();
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

/**
 * Requests name the prefill instances of a sidecar; each must be allowed.
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
  throw new KvError("KV_CONFIG_INVALID", message, {
    hint: "give --allow-prefill with addresses, blocks such as 10.0.0.0/8 or names; * allows every host",
  });
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
