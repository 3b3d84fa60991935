import type { IncomingHttpHeaders } from "node:http";
import {
  type Ambient,
  type AmbientOptions,
  ambient,
  type Clock,
  KvError,
  type Log,
  type Timer,
  YieldingQueue,
} from "@kv/interface";
import { type Discovery, DiscoveryFollower, ObservedDiscovery } from "./discovery/discovery.js";
import { dnsDiscovery, fileDiscovery } from "./discovery/polled-discovery.js";
import { HealthChecks, type HealthProbeRequest } from "./health/health-checks.js";
import type { InstanceStatus, Role } from "./instances/instance.js";
import { parseInstanceSpec } from "./instances/instance-spec.js";
import type { PooledInstance } from "./instances/pooled-instance.js";
import { kvEventTurns } from "./kv-events/kv-event-subscriber.js";
import type { InstanceGet } from "./pairing/engine-facts.js";
import { Pairing } from "./pairing/pairing.js";
import { Deadline } from "./request/deadline.js";
import type { GenerationRequest } from "./request/generation-request.js";
import { builtInRouting } from "./routing/built-in-routings.js";
import { InstancePool } from "./routing/instance-pool.js";
import { PrefillCosts } from "./routing/prefill-costs.js";
import type { Routing } from "./routing/routing.js";
import type { FleetSettings } from "./settings/fleet-settings.js";
import { AutoscalingSignals, type SignalsStatus } from "./telemetry/autoscaling-signals.js";
import { bothMetrics, PrometheusMetrics } from "./telemetry/prometheus.js";
import { forwardedHeaders } from "./upstream/forwarded-headers.js";
import { PromptRenderer } from "./upstream/prompt-renderer.js";
import { Upstream } from "./upstream/upstream.js";

/**
 * What a program may pass to a front end, besides its settings. `metrics` receives all metrics,
 * besides the route `/metrics`. `tracer` records the spans of requests; without it, trace headers
 * of clients pass unchanged.
 */
export interface FrontEndOptions extends AmbientOptions {
  /**
   * Creates the routing strategy of each role, which the front end closes. @default the setting
   * `routing` names it
   */
  readonly createRouting?: ((role: Role) => Routing) | undefined;
  /**
   * Creates a source of instances, besides the settings' lists. @default the setting `discovery`
   * names it
   */
  readonly createDiscovery?: (() => Discovery) | undefined;
}

/** What `Fleet` gets from its user. */
export interface FleetOptions extends FrontEndOptions {
  readonly settings: FleetSettings;
  /**
   * Requests name their prefill instances, so these are neither followed nor checked, and the fleet
   * can serve without. @default false
   */
  readonly namesPrefillers?: boolean | undefined;
}

/** The state of a front end as JSON, for `/status`. */
export interface FleetStatus {
  readonly routing: string;
  readonly draining: boolean;
  readonly signals: SignalsStatus;
  readonly prefillers: readonly InstanceStatus[];
  readonly decoders: readonly InstanceStatus[];
}

/** Whether a front end can serve. */
export interface FleetHealth {
  /** True while an instance of each role and a pair are available, and it does not drain. */
  readonly ok: boolean;
  readonly body: {
    readonly status: "ok" | "unavailable";
    readonly prefill_instances: number;
    readonly decode_instances: number;
    readonly paired: boolean;
  };
}

/**
 * What a front end has besides its own protocol: the instances of both roles with what follows them
 * (discovery, health checks, pairing, token ids, the HTTP client to them), and what shows them
 * (metrics, status, signals).
 */
export class Fleet {
  readonly ambient: Ambient;
  readonly pools: Readonly<Record<Role, InstancePool>>;
  readonly pairing: Pairing | undefined;
  readonly upstream: Upstream;
  readonly get: InstanceGet;
  readonly discovery: ObservedDiscovery | undefined;
  readonly prefillCosts = new PrefillCosts();
  /** Where long bodies wait to be parsed: together they take at most a quarter of the time. */
  readonly parses: YieldingQueue;
  readonly signals: AutoscalingSignals;
  readonly prometheus: PrometheusMetrics;
  /** The front end closes: health is not ok from now on. */
  isDraining = false;
  #lastPart: Promise<void> = Promise.resolve();
  readonly #options: FleetOptions;
  readonly #renderer: PromptRenderer;
  readonly #routings: Readonly<Record<Role, Routing>>;
  readonly #health: HealthChecks | undefined;
  readonly #follower: DiscoveryFollower | undefined;

  /**
   * Begins to check and to follow the instances.
   *
   * @throws `KV_CONFIG_INVALID` where there are none, and no discovery.
   */
  constructor(options: FleetOptions) {
    const { settings, metrics, createRouting, createDiscovery, namesPrefillers = false } = options;
    const { clock, random, log, tracer } = ambient(options);
    const { timeouts, health } = settings;
    this.#options = options;
    const found = createDiscovery?.() ?? configuredDiscovery(settings.discovery, clock);
    const discovery = found === undefined ? undefined : new ObservedDiscovery(found);
    this.discovery = discovery;
    if (discovery === undefined)
      requireInstances(settings, namesPrefillers ? ["decoders"] : ["prefillers", "decoders"]);
    const upstream = new Upstream({
      clock,
      connectMs: timeouts.connectMs,
      onClosed: (origin) => this.pairing?.closed(origin),
    });
    this.upstream = upstream;
    const get = instanceGet(upstream, clock);
    this.get = get;
    const turns = kvEventTurns(clock);
    const routing = (role: Role) =>
      createRouting?.(role) ?? builtInRouting(settings.routing[role], { clock, log, get, turns });
    this.#routings = { prefill: routing("prefill"), decode: routing("decode") };
    const pairing = createPairing(settings.pairing, get, { clock, log });
    this.pairing = pairing;
    const pool = (role: Role, instances: FleetSettings["prefillers"]) =>
      new InstancePool({
        role,
        instances: instances.map(parseInstanceSpec),
        routing: this.#routings[role],
        clock,
        random,
        times: timeouts,
        pairing,
        added: (instance) => {
          if (role === "decode" || !namesPrefillers) this.#health?.check(instance);
        },
      });
    const prefill = pool("prefill", settings.prefillers);
    const decode = pool("decode", settings.decoders);
    this.pools = { prefill, decode };
    this.prometheus = new PrometheusMetrics([prefill, decode]);
    this.ambient = {
      clock,
      random,
      log,
      tracer,
      metrics: metrics === undefined ? this.prometheus : bothMetrics(metrics, this.prometheus),
    };
    this.parses = new YieldingQueue({ clock });
    this.signals = new AutoscalingSignals({
      prefillers: prefill,
      decoders: decode,
      pairing,
      clock,
      costs: this.prefillCosts,
      metrics: this.ambient.metrics,
    });
    this.prometheus.addSignals(() => this.signals.status());
    if (discovery !== undefined) this.prometheus.addDiscovery(discovery);
    const { prefill: forwarded } = forwardedHeaders(settings.forwardHeaders);
    // Which prefill instances there are is not known where requests name them.
    const renderers = namesPrefillers ? decode : prefill;
    this.#renderer = new PromptRenderer({ renderers, upstream, forwarded, ambient: this.ambient });
    // A name that resolves to nothing that answers is known to be unreachable within the time to
    // connect.
    const timeoutMs = Math.min(health.timeoutMs, timeouts.connectMs);
    const probe = async (request: HealthProbeRequest) => (await get(request)).status;
    // Whoever names prefill instances knows their health. With a sidecar at each decode instance
    // they would be checked very often.
    const checked = namesPrefillers ? [decode] : [prefill, decode];
    this.#health = new HealthChecks(checked, probe, { ...health, timeoutMs }, { clock, log });
    this.#follower =
      discovery === undefined || namesPrefillers
        ? undefined
        : new DiscoveryFollower(discovery, this.pools, { log });
  }

  /**
   * Resolves when the side channels of the first instances were read, or when that takes too long.
   */
  async firstReadings(): Promise<void> {
    const { pairing } = this;
    if (pairing === undefined) return;
    const { settings } = this.#options;
    let timer: Timer | undefined;
    const late = new Promise<void>((resolve) => {
      timer = this.ambient.clock.setTimer(resolve, settings.pairing.timeoutMs, { ref: true });
    });
    await Promise.race([pairing.settled(), late]);
    timer?.cancel();
  }

  check(instance: PooledInstance): void {
    this.#health?.check(instance);
  }

  async addTokenIds(request: GenerationRequest, headers: IncomingHttpHeaders): Promise<void> {
    request.tokenIds = await this.#renderer.tokenIds(request, headers);
  }

  /**
   * Whether requests can be served. Instances that were not seen for a second are checked first.
   */
  async health(): Promise<FleetHealth> {
    await this.#health?.verify();
    const [prefill, decode] = [this.pools.prefill.available(), this.pools.decode.available()];
    const { namesPrefillers = false } = this.#options;
    const paired = namesPrefillers || (this.pairing?.hasPair() ?? true);
    const ok = (namesPrefillers || prefill > 0) && decode > 0 && paired && !this.isDraining;
    const status = ok ? "ok" : "unavailable";
    return { ok, body: { status, prefill_instances: prefill, decode_instances: decode, paired } };
  }

  /**
   * Resolves when it is a part's turn: of many parts, whose answers may all come at once, one after
   * another chooses its instance and builds its body, in turns with other requests and as fast as
   * long bodies leave.
   */
  partTurn(): Promise<void> {
    const turn = async () => {
      do await this.parses.turn();
      while (this.upstream.longBodies.isBusy);
    };
    this.#lastPart = this.#lastPart.then(turn);
    return this.#lastPart;
  }

  status(): FleetStatus {
    const { prefill, decode } = this.pools;
    return {
      routing: decode.routing,
      draining: this.isDraining,
      signals: this.signals.status(),
      prefillers: prefill.status(),
      decoders: decode.status(),
    };
  }

  stop(): void {
    this.#health?.close();
    this.#follower?.close();
    this.pairing?.close();
  }

  /** As `stop`, and closes all connections to instances. */
  async close(): Promise<void> {
    this.stop();
    await this.upstream.close();
    this.#routings.prefill.close?.();
    this.#routings.decode.close?.();
  }
}

function createPairing(
  { mode, ...settings }: FleetSettings["pairing"],
  get: InstanceGet,
  { clock, log }: { readonly clock: Clock; readonly log: Log },
): Pairing | undefined {
  if (mode === "off") {
    log.warn("pairing-off", {
      hint: "a request may go to a prefill and a decode instance that do not fit: it fails there, or its text is wrong",
    });
    return undefined;
  }
  return new Pairing({ mode, ...settings, get, clock, log });
}

function configuredDiscovery(
  settings: FleetSettings["discovery"],
  clock: Clock,
): Discovery | undefined {
  if (settings === undefined) return undefined;
  const { file, dns, kubernetes, intervalMs } = settings;
  if (kubernetes !== undefined) {
    throw new KvError("KV_CONFIG_INVALID", "discovery.kubernetes is a setting of the programs", {
      hint: 'pass createDiscovery: const discovery = await kubernetesDiscovery(…), of "@kv/fleet/kubernetes"',
    });
  }
  const polling = { clock, intervalMs };
  if (file !== undefined) return fileDiscovery(file, polling);
  return dns === undefined ? undefined : dnsDiscovery(dns, polling);
}

function requireInstances(
  settings: FleetSettings,
  roles: readonly ("prefillers" | "decoders")[],
): void {
  for (const role of roles) {
    if (settings[role].length > 0) continue;
    const message = `the setting ${role} names no instance, and there is no discovery`;
    throw new KvError("KV_CONFIG_INVALID", message, {
      hint: `name one in ${role}, or set discovery`,
    });
  }
}

/** The proxy's own GETs at an instance. A body is cut after 64 KiB. */
function instanceGet(upstream: Upstream, clock: Clock): InstanceGet {
  return async ({ role, url, path, timeoutMs }) => {
    const deadline = new Deadline({ clock, requestMs: timeoutMs });
    try {
      const answer = await upstream.send({
        role,
        url,
        method: "GET",
        path,
        headers: {},
        abort: deadline,
      });
      const { bytes } = await answer.body.readLimited(64 * 1024);
      answer.discard();
      return { status: answer.status, body: bytes.toString() };
    } finally {
      deadline.close();
    }
  };
}
