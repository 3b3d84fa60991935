import { type Clock, KvError, type Log, type Random, type Timer } from "@kv/interface";
import { type Discovery, DiscoveryFollower } from "./discovery/discovery.js";
import { ObservedDiscovery } from "./discovery/observed-discovery.js";
import { dnsDiscovery, fileDiscovery } from "./discovery/polled-discovery.js";
import { HealthChecks } from "./health/health-checks.js";
import type { Role } from "./instances/instance.js";
import { InstancePool } from "./instances/instance-pool.js";
import { parseInstanceSpec } from "./instances/instance-spec.js";
import type { PooledInstance } from "./instances/pooled-instance.js";
import type { InstanceGet } from "./pairing/engine-facts.js";
import { Pairing } from "./pairing/pairing.js";
import { builtInRouting } from "./routing/built-in-routings.js";
import type { Routing } from "./routing/routing.js";
import type { FleetSettings } from "./settings/fleet-settings.js";
import { healthProbe, instanceGet } from "./upstream/health-probe.js";
import { Upstream } from "./upstream/upstream.js";

/** What `Fleet` gets from its user. */
export interface FleetOptions {
  /** The settings, with their defaults. */
  readonly settings: FleetSettings;
  /** Times everything. */
  readonly clock: Clock;
  /** Randomness for routing. */
  readonly random: Random;
  /** Gets what changes: instances, their health and their pairs. */
  readonly log: Log;
  /** Creates the routing strategy of each role. @default the setting `routing` names it */
  readonly createRouting?: ((role: Role) => Routing) | undefined;
  /** Creates a source of instances, besides the settings' lists. @default the setting `discovery` names it */
  readonly createDiscovery?: (() => Discovery) | undefined;
  /** Requests name their prefill instances, so these are neither followed nor checked, and the fleet can serve without. @default false */
  readonly namesPrefillers?: boolean | undefined;
}

/** Whether a front end can serve, as JSON. */
export interface FleetHealth {
  /** True while an instance of each role and a pair are available. */
  readonly ok: boolean;
  /** Available prefill instances. */
  readonly prefill_instances: number;
  /** Available decode instances. */
  readonly decode_instances: number;
  /** Whether a prefill and a decode instance that fit are available. */
  readonly paired: boolean;
}

/** The instances of both roles with what follows them: discovery, health checks, pairing, and the HTTP client to them. */
export class Fleet {
  /** The instances of each role. */
  readonly pools: Readonly<Record<Role, InstancePool>>;
  /** Undefined where pairing is off. */
  readonly pairing: Pairing | undefined;
  /** The HTTP client to the instances. */
  readonly upstream: Upstream;
  /** The source of instances besides the settings' lists. */
  readonly discovery: ObservedDiscovery | undefined;
  readonly #options: FleetOptions;
  readonly #routings: Readonly<Record<Role, Routing>>;
  /** Undefined while the first instances are added. */
  readonly #health: HealthChecks | undefined;
  readonly #follower: DiscoveryFollower | undefined;

  /** Begins to check and to follow the instances. Errors: `KV_CONFIG_INVALID` where there are none, and no discovery. */
  constructor(options: FleetOptions) {
    const { settings, clock, random, log, createRouting, createDiscovery, namesPrefillers = false } = options;
    const { timeouts, health } = settings;
    this.#options = options;
    const found = createDiscovery?.() ?? configuredDiscovery(settings.discovery, clock);
    const discovery = found === undefined ? undefined : new ObservedDiscovery(found);
    this.discovery = discovery;
    if (discovery === undefined)
      requireInstances(settings, namesPrefillers ? ["decoders"] : ["prefillers", "decoders"]);
    const upstream = new Upstream({
      connectMs: timeouts.connectMs,
      onClosed: (origin) => this.pairing?.closed(origin),
    });
    this.upstream = upstream;
    const get = instanceGet(upstream, clock);
    const routing = (role: Role) =>
      createRouting?.(role) ?? builtInRouting(settings.routing[role], { clock, log, get });
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
    // A name that resolves to nothing that answers is known to be unreachable within the time to connect.
    const timeoutMs = Math.min(health.timeoutMs, timeouts.connectMs);
    const probe = healthProbe(upstream, clock);
    // Whoever names prefill instances knows their health. With a sidecar at each decode instance they would be checked very often.
    const checked = namesPrefillers ? [decode] : [prefill, decode];
    this.#health = new HealthChecks(checked, probe, { ...health, timeoutMs }, { clock, log });
    this.#follower =
      discovery === undefined || namesPrefillers
        ? undefined
        : new DiscoveryFollower(discovery, this.pools, { log });
  }

  /** Resolves when the side channels of the first instances were read, or when that takes too long. */
  async firstReadings(): Promise<void> {
    const { pairing } = this;
    if (pairing === undefined) return;
    const { clock, settings } = this.#options;
    let timer: Timer | undefined;
    const late = new Promise<void>((resolve) => {
      timer = clock.setTimer(resolve, settings.pairing.timeoutMs, { ref: true });
    });
    await Promise.race([pairing.settled(), late]);
    timer?.cancel();
  }

  /** Checks an instance at once. */
  check(instance: PooledInstance): void {
    this.#health?.check(instance);
  }

  /** Whether requests can be served. Instances that were not seen for a second are checked first. */
  async health(): Promise<FleetHealth> {
    await this.#health?.verify();
    const [prefill, decode] = [this.pools.prefill.available(), this.pools.decode.available()];
    const { namesPrefillers = false } = this.#options;
    const paired = namesPrefillers || (this.pairing?.hasPair() ?? true);
    return {
      ok: (namesPrefillers || prefill > 0) && decode > 0 && paired,
      prefill_instances: prefill,
      decode_instances: decode,
      paired,
    };
  }

  /** Ends checks, discovery and pairing. Requests in flight go on. */
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

function configuredDiscovery(settings: FleetSettings["discovery"], clock: Clock): Discovery | undefined {
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

function requireInstances(settings: FleetSettings, roles: readonly ("prefillers" | "decoders")[]): void {
  for (const role of roles) {
    if (settings[role].length > 0) continue;
    const message = `the setting ${role} names no instance, and there is no discovery`;
    throw new KvError("KV_CONFIG_INVALID", message, { hint: `name one in ${role}, or set discovery` });
  }
}
