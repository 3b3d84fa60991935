import type { IncomingHttpHeaders } from "node:http";
import { isDeepStrictEqual } from "node:util";
import {
  type Ambient,
  type AmbientOptions,
  ambient,
  type Clock,
  YieldingQueue,
} from "@kv/interface";
import {
  type Discovery,
  DiscoveryFollower,
  dnsDiscovery,
  fileDiscovery,
  type ObservedDiscovery,
  observed,
} from "./discovery/discovery.js";
import { HealthChecks } from "./health/health-checks.js";
import { type InstanceStatus, instanceName, type Role } from "./instances/instance.js";
import { parseInstanceSpec } from "./instances/instance-spec.js";
import type { PooledInstance } from "./instances/pooled-instance.js";
import { kvEventTurns } from "./kv-events/kv-event-subscriber.js";
import { KvSources } from "./kv-sources/kv-sources.js";
import type { PoolKeysStatus } from "./kv-sources/pool-keys.js";
import { WarmStart } from "./kv-sources/warm-start.js";
import type { InstanceGet } from "./pairing/engine-facts.js";
import { Pairing } from "./pairing/pairing.js";
import { within } from "./repeat.js";
import type { GenerationRequest } from "./request/generation-request.js";
import { builtInRouting, type RoutingName } from "./routing/built-in-routings.js";
import { InstancePool, type InstancePools } from "./routing/instance-pool.js";
import { PrefillCosts } from "./routing/prefill-costs.js";
import type { Routing } from "./routing/routing.js";
import type { FleetSettings } from "./settings/fleet-settings.js";
import { invalidConfig } from "./settings/invalid-config.js";
import { AutoscalingSignals, type SignalsStatus } from "./telemetry/autoscaling-signals.js";
import { bothMetrics, PrometheusMetrics } from "./telemetry/prometheus.js";
import { type ForwardedHeaders, forwardedHeaders } from "./upstream/forwarded-headers.js";
import { PromptRenderer } from "./upstream/prompt-renderer.js";
import { instanceGet, Upstream } from "./upstream/upstream.js";

/**
 * What a program may pass besides settings. `metrics` receives what `/metrics` shows. `tracer`
 * records spans; without it, clients' trace headers pass unchanged.
 */
export interface FrontEndOptions extends AmbientOptions {
  /** The front end closes each role's strategy. @default the setting `routing` names it */
  readonly createRouting?: ((role: Role) => Routing) | undefined;
  /** Creates a further source of instances. @default the setting `discovery` names it */
  readonly createDiscovery?: (() => Discovery) | undefined;
}

/** Settings that take effect without a restart. */
export type ReloadedByFleet = Pick<FleetSettings, "prefillers" | "decoders" | "routing">;

/** Options of `Fleet`. */
export interface FleetOptions extends FrontEndOptions {
  readonly settings: FleetSettings;
  /**
   * Requests name their prefill instances, so the fleet neither needs, follows nor checks them.
   * @default false
   */
  readonly namesPrefillers?: boolean | undefined;
}

/** The state of a front end, for `/status`. */
export interface FleetStatus {
  readonly routing: string;
  readonly draining: boolean;
  readonly signals: SignalsStatus;
  readonly kv_pools: readonly PoolKeysStatus[];
  readonly prefillers: readonly InstanceStatus[];
  readonly decoders: readonly InstanceStatus[];
}

/** Whether a front end can serve. */
export interface FleetHealth {
  /** True while each role is available, a pair is too, and nothing drains. */
  readonly ok: boolean;
  readonly body: {
    readonly status: "ok" | "unavailable";
    readonly prefill_instances: number;
    readonly decode_instances: number;
    readonly paired: boolean;
  };
}

/** The instances of both roles, and what follows and shows them. */
export class Fleet {
  readonly ambient: Ambient;
  readonly pools: InstancePools;
  readonly pairing: Pairing | undefined;
  readonly upstream: Upstream;
  readonly get: InstanceGet;
  readonly discovery: ObservedDiscovery | undefined;
  readonly prefillCosts = new PrefillCosts();
  /** Client headers that instances of each role get. */
  readonly forwarded: ForwardedHeaders;
  /** Parses long bodies in at most a quarter of the time. */
  readonly parses: YieldingQueue;
  readonly signals: AutoscalingSignals;
  /** Undefined where no settings name one. */
  readonly kvSources: KvSources | undefined;
  readonly prometheus: PrometheusMetrics;
  /** Health is not ok while set. */
  isDraining = false;
  #lastPart: Promise<void> = Promise.resolve();
  readonly #namesPrefillers: boolean;
  readonly #createRouting: (role: Role, name: RoutingName) => Routing;
  readonly #renderer: PromptRenderer;
  #routings: Readonly<Record<Role, Routing>>;
  readonly #settings: FleetSettings;
  readonly #health: HealthChecks | undefined;
  readonly #warmStart: WarmStart | undefined;
  readonly #follower: DiscoveryFollower | undefined;

  /** @throws `KV_CONFIG_INVALID` without instances and discovery. */
  constructor(options: FleetOptions) {
    const { settings, metrics, createRouting, createDiscovery, namesPrefillers = false } = options;
    const given = ambient(options);
    const { clock, random, log } = given;
    const { timeouts, health } = settings;
    this.#namesPrefillers = namesPrefillers;
    const found = createDiscovery?.() ?? configuredDiscovery(settings.discovery, clock);
    this.discovery = found && observed(found);
    this.#requireInstances(settings);
    this.upstream = new Upstream({
      clock,
      connectMs: timeouts.connectMs,
      onClosed: (origin) => this.pairing?.closed(origin),
    });
    const get = instanceGet(this.upstream, clock);
    this.get = get;
    const turns = kvEventTurns(clock);
    this.#createRouting = (role, name) =>
      createRouting?.(role) ?? builtInRouting(name, { clock, log, get, turns });
    this.#settings = settings;
    this.#routings = this.#newRoutings(settings.routing);
    const { mode, ...reading } = settings.pairing;
    if (mode === "off")
      log.warn("pairing-off", {
        hint: "a request may go to a prefill and a decode instance that do not fit: it fails there, or its text is wrong",
      });
    else this.pairing = new Pairing({ mode, ...reading, get, clock, log });
    const { pairing, upstream, discovery } = this;
    const pool = (role: Role, instances: FleetSettings["prefillers"]) =>
      new InstancePool({
        role,
        instances: instances.map(parseInstanceSpec),
        routing: this.#routings[role],
        clock,
        random,
        log,
        times: timeouts,
        outlierDetection: settings.outlierDetection,
        pairing,
        added: (instance) => {
          if (role === "decode" || !namesPrefillers) this.#health?.check(instance);
          if (role === "prefill" && !namesPrefillers) void this.#warmStart?.warm(instance);
        },
        leaving: async (instance) => this.kvSources?.handOver(instance),
      });
    const prefill = pool("prefill", settings.prefillers);
    const decode = pool("decode", settings.decoders);
    this.pools = { prefill, decode };
    this.prometheus = new PrometheusMetrics([prefill, decode]);
    const { prometheus } = this;
    this.ambient = {
      ...given,
      metrics: metrics === undefined ? prometheus : bothMetrics(metrics, prometheus),
    };
    const parses = new YieldingQueue({ clock });
    this.parses = parses;
    const { pools: kvPools, tierPort } = settings.kvSources;
    this.kvSources =
      kvPools.length === 0 && tierPort === undefined
        ? undefined
        : new KvSources({
            settings: settings.kvSources,
            pools: this.pools,
            costs: this.prefillCosts,
            get,
            parses,
            ...this.ambient,
          });
    this.#warmStart =
      this.kvSources &&
      new WarmStart({
        sources: this.kvSources,
        upstream,
        hasChecks: health.intervalMs > 0,
        ...this.ambient,
      });
    this.signals = new AutoscalingSignals({
      pools: this.pools,
      pairing,
      costs: this.prefillCosts,
      ...this.ambient,
    });
    prometheus.addSignals(() => this.signals.status());
    if (discovery !== undefined) prometheus.addDiscovery(discovery);
    this.forwarded = forwardedHeaders(settings.forwardHeaders);
    const { prefill: forwarded } = this.forwarded;
    const renderers = namesPrefillers ? decode : prefill;
    this.#renderer = new PromptRenderer({ renderers, upstream, forwarded, ambient: this.ambient });
    // An unreachable name is known after the time to connect.
    const timeoutMs = Math.min(health.timeoutMs, timeouts.connectMs);
    // Many sidecars would check them too often.
    const checked = namesPrefillers ? [decode] : [prefill, decode];
    this.#health = new HealthChecks(checked, get, { ...health, timeoutMs }, clock);
    this.#follower =
      discovery === undefined || namesPrefillers
        ? undefined
        : new DiscoveryFollower(discovery, this.pools, { log });
  }

  /** Resolves when the first side channels were read, or after a time limit. */
  async firstReadings(): Promise<void> {
    const { timeoutMs } = this.#settings.pairing;
    if (this.pairing !== undefined)
      await within(this.ambient.clock, timeoutMs, this.pairing.settled());
  }

  #newRoutings(named: FleetSettings["routing"]): Readonly<Record<Role, Routing>> {
    const of = (role: Role) => this.#createRouting(role, named[role]);
    return { prefill: of("prefill"), decode: of("decode") };
  }

  /**
   * Adds and drains instances, and changes strategies, where these settings differ from those of
   * the fleet, which then has these. Instances that came otherwise stay.
   * @throws As the constructor; then nothing has changed.
   */
  reload(settings: ReloadedByFleet): void {
    this.#requireInstances(settings);
    const before = this.#settings;
    const changes = [
      instanceChanges(this.pools.prefill, before.prefillers, settings.prefillers),
      instanceChanges(this.pools.decode, before.decoders, settings.decoders),
    ];
    const replaced = isDeepStrictEqual(before.routing, settings.routing)
      ? undefined
      : this.#routings;
    if (replaced !== undefined) this.#routings = this.#newRoutings(settings.routing);

    const { prefillers, decoders, routing } = settings;
    Object.assign(before, { prefillers, decoders, routing });
    for (const change of changes) change();
    if (replaced === undefined) return;
    for (const role of ["prefill", "decode"] as const) {
      this.pools[role].reroute(this.#routings[role]);
      replaced[role].close?.();
    }
  }

  #requireInstances(settings: ReloadedByFleet): void {
    if (this.discovery !== undefined) return;
    const { prefillers, decoders } = settings;
    const isMissing = prefillers.length === 0 && !this.#namesPrefillers;
    if (!isMissing && decoders.length > 0) return;
    const role = isMissing ? "prefill" : "decode";
    throw invalidConfig(
      `no ${role} instance is given`,
      `give --${role} http://host:port, one or more, or a discovery`,
    );
  }

  check(instance: PooledInstance): void {
    this.#health?.check(instance);
  }

  async addTokenIds(request: GenerationRequest, headers: IncomingHttpHeaders): Promise<void> {
    request.tokenIds = await this.#renderer.tokenIds(request, headers);
  }

  async health(): Promise<FleetHealth> {
    await this.#health?.verify();
    const [prefill, decode] = [this.pools.prefill.available(), this.pools.decode.available()];
    const paired = this.#namesPrefillers || (this.pairing?.hasPair() ?? true);
    const ok = (this.#namesPrefillers || prefill > 0) && decode > 0 && paired && !this.isDraining;
    const status = ok ? "ok" : "unavailable";
    return { ok, body: { status, prefill_instances: prefill, decode_instances: decode, paired } };
  }

  /**
   * Resolves when a part may build its body. Many parts may come at once, and long bodies leave
   * slowly.
   */
  partTurn(): Promise<void> {
    this.#lastPart = this.#lastPart.then(async () => {
      do await this.parses.turn();
      while (this.upstream.longBodies.isBusy);
    });
    return this.#lastPart;
  }

  status(): FleetStatus {
    const { prefill, decode } = this.pools;
    return {
      routing: decode.routing,
      draining: this.isDraining,
      signals: this.signals.status(),
      kv_pools: this.kvSources?.status() ?? [],
      prefillers: prefill.status(),
      decoders: decode.status(),
    };
  }

  stop(): void {
    this.#health?.close();
    this.#follower?.close();
    this.#warmStart?.close();
    this.kvSources?.close();
    this.pairing?.close();
  }

  async close(): Promise<void> {
    this.stop();
    await this.upstream.close();
    this.#routings.prefill.close?.();
    this.#routings.decode.close?.();
  }
}

function configuredDiscovery(
  settings: FleetSettings["discovery"],
  clock: Clock,
): Discovery | undefined {
  if (settings === undefined) return undefined;
  const { file, dns, kubernetes, intervalMs } = settings;
  if (kubernetes !== undefined) {
    throw invalidConfig(
      "discovery.kubernetes is a setting of the programs",
      'pass createDiscovery: const discovery = await kubernetesDiscovery(…), of "@kv/fleet/kubernetes"',
    );
  }
  const polling = { clock, intervalMs };
  if (file !== undefined) return fileDiscovery(file, polling);
  return dns === undefined ? undefined : dnsDiscovery(dns, polling);
}

/**
 * What makes the instances of a setting those of a pool.
 * @throws `KV_CONFIG_INVALID` for an instance that is named twice.
 */
function instanceChanges(
  pool: InstancePool,
  before: FleetSettings["prefillers"],
  after: FleetSettings["prefillers"],
): () => void {
  const named = new Map(after.map(parseInstanceSpec).map((spec) => [instanceName(spec), spec]));
  if (named.size < after.length)
    throw invalidConfig(`a ${pool.role} instance is given twice`, "name each instance once");
  return () => {
    for (const spec of named.values()) if (pool.find(spec)?.draining !== false) pool.add(spec);
    // An operator may have removed it already.
    for (const spec of before.map(parseInstanceSpec))
      if (!named.has(instanceName(spec))) void pool.remove(spec).catch(() => {});
  };
}
