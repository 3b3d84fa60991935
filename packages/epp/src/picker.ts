import {
  type Discovery,
  type InstancePool,
  type InstanceStatus,
  parseInstanceSpec,
  type Role,
  type Routing,
} from "@kv/fleet";
import {
  AutoscalingSignals,
  bothMetrics,
  Fleet,
  forwardedHeaders,
  PrefillCosts,
  PrometheusMetrics,
  PromptRenderer,
  type SignalsStatus,
} from "@kv/fleet/front-end";
import { BodyBudget, Certificate, type HttpServer, YieldingQueue } from "@kv/http";
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
import { type PickerSettings, type PickerSettingsInput, readSettings } from "./config/settings.js";
import { extProcService } from "./ext-proc/processed-request.js";
import { EndpointPicker, hasAddress } from "./pick/endpoint-picker.js";
import { EXT_PROC, GrpcListener, HEALTH, serverCredentials, serviceOf } from "./server/grpc-server.js";
import { healthService } from "./server/health-service.js";
import { metricsServer } from "./server/metrics-server.js";

/** Options of `createPicker`: the settings, and what a program may pass in. */
export interface PickerOptions extends PickerSettingsInput {
  /** Source of time. @default systemClock() */
  readonly clock?: Clock | undefined;
  /** Randomness for ids and routing. @default systemRandom() */
  readonly random?: Random | undefined;
  /** Gets the events. @default silentLog */
  readonly log?: Log | undefined;
  /** Receives all metrics, besides `/metrics`. @default undefined */
  readonly metrics?: Metrics | undefined;
  /** Records a span for each choice. Trace headers of clients pass unchanged then. @default undefined */
  readonly tracer?: Tracer | undefined;
  /** Creates the routing strategy of each role, which the picker closes. @default the setting `routing` names it */
  readonly createRouting?: ((role: Role) => Routing) | undefined;
  /** Creates a source of instances, besides the settings' lists. @default the setting `discovery` names it */
  readonly createDiscovery?: (() => Discovery) | undefined;
}

/** The state of the picker as JSON, for `/status`. */
export interface PickerStatus {
  /** Name of the routing strategy of the decode instances. */
  readonly routing: string;
  /** True from the call of `close`. */
  readonly draining: boolean;
  /** Requests whose answers have not ended. */
  readonly in_flight: number;
  /** Signals for autoscalers, as far as the picker sees them. */
  readonly signals: SignalsStatus;
  /** The prefill instances. */
  readonly prefillers: readonly InstanceStatus[];
  /** The decode instances. */
  readonly decoders: readonly InstanceStatus[];
}

/** Where the picker listens. */
export interface PickerAddress {
  /** The host that was passed to `listen`. */
  readonly host: string;
  /** The port of ext_proc and gRPC health, also where a free one was taken. */
  readonly port: number;
  /** The port of gRPC health without TLS; undefined where the settings have none. */
  readonly healthPort?: number | undefined;
  /** URL of `/metrics`; undefined where the settings have none. */
  readonly metricsUrl?: string | undefined;
}

/** An Endpoint Picker. */
export interface Picker {
  /**
   * Starts to serve gateways, on 127.0.0.1 and port 9002 by default; port 0 takes a free one. Errors: `KV_CONFIG_INVALID` when a port is taken or the
   * host is not of this machine.
   */
  listen(options?: { host?: string | undefined; port?: number | undefined }): Promise<PickerAddress>;
  /** The present state. */
  status(): PickerStatus;
  /** The instances of both roles, for a program that adds, drains and removes them. */
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /**
   * Health says NOT_SERVING from now on. After `drainMs` no further requests are taken; those in flight may end within `graceMs`. The defaults are the
   * settings' `timeouts`. A second call ends both waits at once.
   */
  close(options?: { drainMs?: number | undefined; graceMs?: number | undefined }): Promise<void>;
  /** `close` with the defaults. */
  [Symbol.asyncDispose](): Promise<void>;
}

/** Creates an Endpoint Picker for Envoy and gateways like it. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`. */
export function createPicker(options: PickerOptions): Picker {
  return new ExtProcPicker(options);
}

class ExtProcPicker implements Picker {
  readonly instances: Readonly<Record<Role, InstancePool>>;
  readonly #settings: PickerSettings;
  readonly #ambient: Ambient;
  readonly #fleet: Fleet;
  readonly #signals: AutoscalingSignals;
  readonly #listener: GrpcListener;
  readonly #healthListener: GrpcListener | undefined;
  readonly #metricsServer: HttpServer | undefined;
  readonly #certificate: Certificate | undefined;
  readonly #inFlight = { requests: 0 };
  #draining = false;
  #closing: Promise<void> | undefined = undefined;
  #endDraining: (() => void) | undefined = undefined;

  constructor(options: PickerOptions) {
    const { clock, random, log, metrics, tracer, createRouting, createDiscovery, ...input } = options;
    const settings = readSettings(input);
    this.#settings = settings;
    const own = {
      clock: clock ?? systemClock(),
      random: random ?? systemRandom(),
      log: log ?? silentLog,
      tracer,
    };
    requireAddresses(settings);
    const { tls } = settings;
    this.#certificate = tls === false ? undefined : new Certificate(tls, { commonName: "kv-epp", ...own });
    const fleet = new Fleet({ settings, ...own, createRouting, createDiscovery });
    this.#fleet = fleet;
    this.instances = fleet.pools;
    const { prefill: prefillers, decode: decoders } = fleet.pools;
    const prometheus = new PrometheusMetrics([prefillers, decoders]);
    const ambient: Ambient = {
      ...own,
      metrics: metrics === undefined ? prometheus : bothMetrics(metrics, prometheus),
    };
    this.#ambient = ambient;
    const signals = new AutoscalingSignals({
      prefillers,
      decoders,
      pairing: fleet.pairing,
      clock: own.clock,
    });
    this.#signals = signals;
    prometheus.addSignals(() => signals.status());
    if (fleet.discovery !== undefined) prometheus.addDiscovery(fleet.discovery);
    const { limits } = settings;
    const costs = new PrefillCosts();
    const extProc = extProcService({
      ambient,
      settings,
      fleet,
      picker: new EndpointPicker({ fleet, settings, costs, metrics: ambient.metrics }),
      renderer: new PromptRenderer({
        prefillers,
        upstream: fleet.upstream,
        forwarded: forwardedHeaders(settings.forwardHeaders),
        ambient,
      }),
      budget: new BodyBudget({
        allBytes: limits.bodiesLengthBytes,
        perClientBytes: limits.bodiesLengthBytes,
      }),
      parses: new YieldingQueue({ clock: own.clock }),
      inFlight: this.#inFlight,
    });
    this.#listener = new GrpcListener(serverCredentials(this.#certificate), settings);
    this.#listener.server.addService(serviceOf(EXT_PROC), extProc);
    const health = healthService(async () => (await this.#health()).ok, own.clock);
    this.#listener.server.addService(serviceOf(HEALTH), health);
    if (settings.healthPort !== undefined) {
      this.#healthListener = new GrpcListener(serverCredentials(undefined), settings);
      this.#healthListener.server.addService(serviceOf(HEALTH), health);
    }
    if (settings.metricsServer !== undefined)
      this.#metricsServer = metricsServer({
        clock: ambient.clock,
        prometheus,
        status: () => this.status(),
        health: () => this.#health(),
      });
  }

  async listen({
    host = "127.0.0.1",
    port = 9002,
  }: {
    host?: string | undefined;
    port?: number | undefined;
  } = {}): Promise<PickerAddress> {
    const { healthPort, metricsServer: metrics } = this.#settings;
    await this.#fleet.firstReadings();
    const address = { host, port: await this.#listener.listen(host, port) };
    const probes = await this.#healthListener?.listen(host, healthPort ?? 0);
    if (metrics === undefined) return { ...address, healthPort: probes };
    const metricsPort = await this.#metricsServer?.listen(metrics.host, metrics.port);
    const shown = metrics.host.includes(":") ? `[${metrics.host}]` : metrics.host;
    return { ...address, healthPort: probes, metricsUrl: `http://${shown}:${metricsPort}` };
  }

  status(): PickerStatus {
    const { prefill, decode } = this.instances;
    return {
      routing: decode.routing,
      draining: this.#draining,
      in_flight: this.#inFlight.requests,
      signals: this.#signals.status(),
      prefillers: prefill.status(),
      decoders: decode.status(),
    };
  }

  async close({
    drainMs = this.#settings.timeouts.drainMs,
    graceMs = this.#settings.timeouts.graceMs,
  }: {
    drainMs?: number | undefined;
    graceMs?: number | undefined;
  } = {}): Promise<void> {
    this.#draining = true;
    if (this.#closing !== undefined) {
      this.#endDraining?.();
      this.#listener.server.forceShutdown();
    }
    this.#closing ??= this.#closeAll(drainMs, graceMs);
    await this.#closing;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  async #health() {
    const { ok: isHealthy, ...instances } = await this.#fleet.health();
    const ok = isHealthy && !this.#draining;
    return { ok, body: { status: ok ? "ok" : "unavailable", ...instances } };
  }

  async #closeAll(drainMs: number, graceMs: number): Promise<void> {
    await new Promise<void>((resolve) => {
      if (drainMs === 0) return resolve();
      const timer = this.#ambient.clock.setTimer(resolve, drainMs, { ref: true });
      this.#endDraining = () => {
        timer.cancel();
        resolve();
      };
    });
    this.#fleet.stop();
    await this.#listener.close(graceMs);
    await this.#healthListener?.close(0);
    await this.#metricsServer?.close();
    this.#certificate?.close();
    await this.#fleet.close();
  }
}

/** A gateway takes `ip:port`. Of instances that are discovered later, those with names are left out. */
function requireAddresses({ decoders }: PickerSettings): void {
  for (const decoder of decoders) {
    const { url } = parseInstanceSpec(decoder);
    if (hasAddress({ url })) continue;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `the decode instance ${url} has a name in place of an IP address`,
      {
        hint: "gateways take ip:port: give --decode ip:port, or --dns-decode, which resolves names",
      },
    );
  }
}
