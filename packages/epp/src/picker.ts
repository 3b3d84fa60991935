import { type InstancePools, parseInstanceSpec } from "@kv/fleet";
import {
  AdminServer,
  Fleet,
  type FleetStatus,
  type FrontEndOptions,
  invalidConfig,
  type Reloaded,
  reloadedSettings,
  within,
} from "@kv/fleet/front-end";
import { Certificate } from "@kv/http";
import { type PickerSettings, type PickerSettingsInput, readSettings } from "./config/settings.js";
import { ExtProc } from "./ext-proc/processed-request.js";
import { hasAddress } from "./pick/endpoint-picker.js";
import {
  EXT_PROC,
  GrpcListener,
  HEALTH,
  serverCredentials,
  serviceOf,
} from "./server/grpc-server.js";
import { healthService } from "./server/health-service.js";

/** Options of `createPicker`. */
export interface PickerOptions extends PickerSettingsInput, FrontEndOptions {}

/** The picker's state for `/status`. */
export interface PickerStatus extends FleetStatus {
  readonly in_flight: number;
}

/** Where the picker listens. */
export interface PickerAddress {
  readonly host: string;
  readonly port: number;
  /** Port of gRPC health without TLS. */
  readonly healthPort?: number | undefined;
  readonly metricsUrl?: string | undefined;
}

/** Where `Picker.listen` listens. */
export interface PickerListenOptions {
  /** @default 127.0.0.1 */
  readonly host?: string | undefined;
  /** 0 takes a free one. @default 9002 */
  readonly port?: number | undefined;
}

/** How `Picker.close` closes. */
export interface PickerCloseOptions {
  /** @default `timeouts.drainMs` of the settings */
  readonly drainMs?: number | undefined;
  /** @default `timeouts.graceMs` of the settings */
  readonly graceMs?: number | undefined;
}

/**
 * Creates an Endpoint Picker for Envoy-like gateways.
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`.
 */
export function createPicker(options: PickerOptions): Picker {
  return new Picker(options);
}

/** An Endpoint Picker, made by `createPicker`. */
export class Picker {
  /** For adding, draining and removing instances. */
  readonly instances: InstancePools;
  readonly #settings: PickerSettings;
  readonly #fleet: Fleet;
  readonly #listener: GrpcListener;
  readonly #healthListener: GrpcListener | undefined;
  readonly #metricsServer: AdminServer | undefined;
  readonly #certificate: Certificate | undefined;
  readonly #extProc: ExtProc;
  #closing: Promise<void> | undefined;
  #endDraining: (() => void) | undefined;

  constructor(options: PickerOptions) {
    const {
      clock: _,
      random,
      log,
      metrics,
      tracer,
      createRouting,
      createDiscovery,
      ...input
    } = options;
    const settings = readSettings(input);
    this.#settings = settings;
    requireAddresses(settings);
    const fleet = new Fleet({ ...options, settings });
    this.#fleet = fleet;
    this.instances = fleet.pools;
    const { ambient } = fleet;
    const { tls, healthPort } = settings;
    this.#certificate =
      tls === false ? undefined : new Certificate(tls, { commonName: "kv-epp", ...ambient });
    this.#extProc = new ExtProc(fleet, settings);
    this.#listener = new GrpcListener(serverCredentials(this.#certificate), settings);
    this.#listener.server.addService(serviceOf(EXT_PROC), this.#extProc.service());
    const health = healthService(async () => (await fleet.health()).ok, ambient.clock);
    this.#listener.server.addService(serviceOf(HEALTH), health);
    if (healthPort !== undefined) {
      this.#healthListener = new GrpcListener(serverCredentials(undefined), settings);
      this.#healthListener.server.addService(serviceOf(HEALTH), health);
    }
    if (settings.metricsServer !== undefined)
      this.#metricsServer = new AdminServer({
        settings: settings.metricsServer,
        clock: ambient.clock,
        operations: {
          status: () => this.status(),
          metrics: fleet.prometheus,
          health: () => fleet.health(),
        },
      });
  }

  /**
   * Starts to serve gateways.
   * @throws `KV_CONFIG_INVALID` when a port is taken or the host is not of this machine.
   */
  async listen({
    host = "127.0.0.1",
    port = 9002,
  }: PickerListenOptions = {}): Promise<PickerAddress> {
    const { healthPort } = this.#settings;
    await this.#fleet.firstReadings();
    await this.#certificate?.ready();
    const address = { host, port: await this.#listener.listen(host, port) };
    const probes = await this.#healthListener?.listen(host, healthPort ?? 0);
    return { ...address, healthPort: probes, metricsUrl: await this.#metricsServer?.listen() };
  }

  /**
   * Takes settings in place of those that the picker was created with. Instances, routing and some
   * limits change at once. Returns what changed, and what needs a restart.
   * @throws As `createPicker`; then nothing has changed.
   */
  reload(input: PickerSettingsInput): Reloaded {
    const next = readSettings(input);
    requireAddresses(next);
    const reloaded = reloadedSettings(this.#settings, next, takesEffect);
    this.#fleet.reload(next);

    for (const name of LIMITS_AT_USE)
      Object.assign(this.#settings.limits, { [name]: next.limits[name] });
    return reloaded;
  }

  status(): PickerStatus {
    return { ...this.#fleet.status(), in_flight: this.#extProc.requestsInFlight };
  }

  /**
   * Health says NOT_SERVING at once. After `drainMs` new requests are refused, and the others have
   * `graceMs` to end. A second call ends both waits.
   */
  async close({
    drainMs = this.#settings.timeouts.drainMs,
    graceMs = this.#settings.timeouts.graceMs,
  }: PickerCloseOptions = {}): Promise<void> {
    this.#fleet.isDraining = true;
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

  async #closeAll(drainMs: number, graceMs: number): Promise<void> {
    const ended = new Promise<void>((resolve) => {
      this.#endDraining = resolve;
    });
    if (drainMs > 0) await within(this.#fleet.ambient.clock, drainMs, ended);
    this.#fleet.stop();
    await this.#listener.close(graceMs);
    await this.#healthListener?.close(0);
    await this.#metricsServer?.close();
    this.#certificate?.close();
    await this.#fleet.close();
  }
}

const LIMITS_AT_USE = [
  "requestsInFlight",
  "requestsPerDecode",
  "bodyLengthBytes",
  "bodyDepth",
  "bodyMembers",
  "bodyValues",
  "subsetEndpoints",
] as const;

const takesEffect = (name: string): boolean =>
  /^(prefillers|decoders|routing)(\.|$)/.test(name) ||
  LIMITS_AT_USE.some((limit) => name === `limits.${limit}`);

/** Instances with names that are discovered later are left out. */
function requireAddresses({ decoders }: PickerSettings): void {
  for (const decoder of decoders) {
    const { url } = parseInstanceSpec(decoder);
    if (hasAddress({ url })) continue;
    throw invalidConfig(
      `the decode instance ${url} has a name in place of an IP address`,
      "gateways take ip:port: give --decode ip:port, or --dns-decode, which resolves names",
    );
  }
}
