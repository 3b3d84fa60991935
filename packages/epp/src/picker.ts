import { type InstancePool, parseInstanceSpec, type Role } from "@kv/fleet";
import { AdminServer, Fleet, type FleetStatus, type FrontEndOptions } from "@kv/fleet/front-end";
import { BodyBudget, Certificate } from "@kv/http";
import { KvError } from "@kv/interface";
import { type PickerSettings, type PickerSettingsInput, readSettings } from "./config/settings.js";
import { extProcService } from "./ext-proc/processed-request.js";
import { EndpointPicker, hasAddress } from "./pick/endpoint-picker.js";
import {
  EXT_PROC,
  GrpcListener,
  HEALTH,
  serverCredentials,
  serviceOf,
} from "./server/grpc-server.js";
import { healthService } from "./server/health-service.js";

/** Options of `createPicker`: the settings, and what a program may pass in. */
export interface PickerOptions extends PickerSettingsInput, FrontEndOptions {}

/** The state of the picker as JSON, for `/status`. */
export interface PickerStatus extends FleetStatus {
  /** Requests whose answers have not ended. */
  readonly in_flight: number;
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
   * Starts to serve gateways, on 127.0.0.1 and port 9002 by default; port 0 takes a free one.
   * @throws `KV_CONFIG_INVALID` when a port is taken or the host is not of this machine.
   */
  listen(options?: {
    host?: string | undefined;
    port?: number | undefined;
  }): Promise<PickerAddress>;
  /** The present state. */
  status(): PickerStatus;
  /** The instances of both roles, for a program that adds, drains and removes them. */
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /**
   * Health says NOT_SERVING from now on. After `drainMs` no further requests are taken; those in
   * flight may end within `graceMs`. The defaults are the settings' `timeouts`. A second call ends
   * both waits at once.
   */
  close(options?: { drainMs?: number | undefined; graceMs?: number | undefined }): Promise<void>;
  /** `close` with the defaults. */
  [Symbol.asyncDispose](): Promise<void>;
}

/**
 * Creates an Endpoint Picker for Envoy and gateways like it.
 * @throws `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`.
 */
export function createPicker(options: PickerOptions): Picker {
  return new ExtProcPicker(options);
}

class ExtProcPicker implements Picker {
  readonly instances: Readonly<Record<Role, InstancePool>>;
  readonly #settings: PickerSettings;
  readonly #fleet: Fleet;
  readonly #listener: GrpcListener;
  readonly #healthListener: GrpcListener | undefined;
  readonly #metricsServer: AdminServer | undefined;
  readonly #certificate: Certificate | undefined;
  readonly #inFlight = { requests: 0 };
  #closing: Promise<void> | undefined = undefined;
  #endDraining: (() => void) | undefined = undefined;

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
    const { tls, limits, healthPort } = settings;
    this.#certificate =
      tls === false ? undefined : new Certificate(tls, { commonName: "kv-epp", ...ambient });
    const extProc = extProcService({
      settings,
      fleet,
      picker: new EndpointPicker({ fleet, settings }),
      budget: new BodyBudget({
        allBytes: limits.bodiesLengthBytes,
        perClientBytes: limits.bodiesLengthBytes,
      }),
      inFlight: this.#inFlight,
    });
    this.#listener = new GrpcListener(serverCredentials(this.#certificate), settings);
    this.#listener.server.addService(serviceOf(EXT_PROC), extProc);
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

  async listen({
    host = "127.0.0.1",
    port = 9002,
  }: {
    host?: string | undefined;
    port?: number | undefined;
  } = {}): Promise<PickerAddress> {
    const { healthPort } = this.#settings;
    await this.#fleet.firstReadings();
    await this.#certificate?.ready();
    const address = { host, port: await this.#listener.listen(host, port) };
    const probes = await this.#healthListener?.listen(host, healthPort ?? 0);
    return { ...address, healthPort: probes, metricsUrl: await this.#metricsServer?.listen() };
  }

  status(): PickerStatus {
    return { ...this.#fleet.status(), in_flight: this.#inFlight.requests };
  }

  async close({
    drainMs = this.#settings.timeouts.drainMs,
    graceMs = this.#settings.timeouts.graceMs,
  }: {
    drainMs?: number | undefined;
    graceMs?: number | undefined;
  } = {}): Promise<void> {
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
    await new Promise<void>((resolve) => {
      if (drainMs === 0) return resolve();
      const timer = this.#fleet.ambient.clock.setTimer(resolve, drainMs, { ref: true });
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

/**
 * A gateway takes `ip:port`. Of instances that are discovered later, those with names are left out.
 */
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
