import type { Server } from "node:http";
import type { AddressInfo } from "node:net";
import { type Ambient, ambient as fillAmbient, KvError } from "@kv/interface";
import { createAdminServer } from "./admin-server.js";
import { createAutoOrder } from "./auto-order.js";
import { type Discovery, followDiscovery } from "./discovery.js";
import { discoveryOf } from "./discovery-sources.js";
import { createGenerationFlow } from "./generation-flow.js";
import { createGenerationRoute } from "./generation-route.js";
import { createHealthChecks } from "./health.js";
import type { InstanceStatus } from "./instance.js";
import { instanceSpec } from "./instance-spec.js";
import { createInstancePool, type InstancePool } from "./instances.js";
import type { LegOrder, LegOrderOptions } from "./leg-order.js";
import { createModelsRoute } from "./models-route.js";
import { type ProxySettings, type ProxySettingsInput, readSettings } from "./options.js";
import { bothMetrics, createPrometheus } from "./prometheus.js";
import { createPullOrder } from "./pull-order.js";
import { createPushOrder, type PushOrderOptions } from "./push-order.js";
import { createRecentRequests } from "./recent.js";
import { type RetryPolicy, retryWhereSafe } from "./retry.js";
import type { Routing } from "./routing.js";
import { routingByName } from "./routing-by-name.js";
import { closeServer, createServer, listen } from "./server.js";
import { openTelemetryTracing, type Tracing } from "./tracing.js";
import { createTraffic, type TrafficStatus } from "./traffic.js";
import { unusedSettings } from "./unused-settings.js";
import { createHttpUpstream, type Role, type Upstream } from "./upstream.js";

export interface ProxyOptions extends ProxySettingsInput, Partial<Ambient> {
  /** Called once for each role; else the settings' `routing` says which. The proxy closes it. */
  readonly createRouting?: (role: Role) => Routing;
  readonly retry?: RetryPolicy;
  /** How instances are reached; HTTP by default. The proxy closes it. */
  readonly upstream?: Upstream;
  /** The order of the legs; else the settings' `mode` says which. */
  readonly createLegOrder?: (options: LegOrderOptions) => LegOrder;
  /** Where instances come from, besides the settings' lists; else the settings' `discovery`. */
  readonly createDiscovery?: () => Discovery;
  /** Spans of the legs; OpenTelemetry's global tracer by default. */
  readonly tracing?: Tracing;
}

export interface ProxyStatus {
  readonly flow: string;
  readonly routing: string;
  readonly draining: boolean;
  readonly uptime_s: number;
  readonly requests: TrafficStatus;
  readonly prefillers: readonly InstanceStatus[];
  readonly decoders: readonly InstanceStatus[];
}

export interface ProxyAddress {
  readonly host: string;
  readonly port: number;
  readonly url: string;
  /** Of the admin routes, where the settings have them. */
  readonly adminUrl?: string;
}

export interface Proxy {
  /** Port 0 takes a free one. Errors: `KV_CONFIG_INVALID` when a port is taken or the host is not this machine's. */
  listen(options?: { host?: string; port?: number }): Promise<ProxyAddress>;
  status(): ProxyStatus;
  /** To add, drain and remove instances from a program. */
  readonly instances: Readonly<Record<Role, InstancePool>>;
  /**
   * Refuses further requests (503), leaves those in flight `graceMs` (default: the settings') to end, aborts the rest. Safe to call
   * twice; the second call may shorten the grace.
   */
  close(options?: { graceMs?: number }): Promise<void>;
}

/** A prefill/decode router in front of OpenAI-style servers. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`. */
export function createProxy(options: ProxyOptions): Proxy {
  const { clock, random, log, metrics, createRouting, retry, upstream: given, ...others } = options;
  const { createLegOrder, createDiscovery, tracing, ...input } = others;
  const settings = readSettings(input);
  const { limits, timeouts, policy, admin } = settings;
  const prometheus = createPrometheus(() => [prefillers, decoders]);
  const counted = metrics === undefined ? prometheus.metrics : bothMetrics(metrics, prometheus.metrics);
  const surroundings = fillAmbient({ ...definedOnly({ clock, random, log }), metrics: counted });

  // A collaborator that was handed in may read what ours would not.
  if (createRouting === undefined && createLegOrder === undefined)
    for (const unused of unusedSettings(input, settings))
      surroundings.log.warn("setting-unused", { ...unused });

  const discovery = createDiscovery?.() ?? discoveryOf(settings.discovery, surroundings.clock);
  if (discovery === undefined) refuseNone(settings);
  const routings = {
    prefill: createRouting?.("prefill") ?? routingByName(settings.routing.prefill, surroundings.log),
    decode: createRouting?.("decode") ?? routingByName(settings.routing.decode, surroundings.log),
  };
  const pool = (role: Role, specs: ProxySettings["prefillers"]) =>
    createInstancePool({
      ...surroundings,
      role,
      instances: specs.map(instanceSpec),
      routing: routings[role],
      times: timeouts,
    });
  const prefillers = pool("prefill", settings.prefillers);
  const decoders = pool("decode", settings.decoders);
  const pools = { prefill: prefillers, decode: decoders };
  const upstream = given ?? createHttpUpstream({ connectMs: timeouts.connectMs });
  const traffic = createTraffic();
  const recent = createRecentRequests();
  const legs: LegOrderOptions = {
    retry: retry ?? retryWhereSafe,
    upstream,
    tracing: tracing ?? openTelemetryTracing(),
    ambient: surroundings,
    prefillers,
    decoders,
    limits,
    timeouts,
    policy,
  };
  const orderOf =
    createLegOrder ??
    ((given: LegOrderOptions) => {
      const pushing = { ...given, legs: settings.pushLegs, newId: surroundings.random.uuid };
      return ORDERS[settings.mode](pushing);
    });
  const flow = createGenerationFlow(legs, orderOf(legs));
  const { requestMs } = timeouts;
  const generation = createGenerationRoute({
    ambient: surroundings,
    flow,
    traffic,
    requestMs,
    recent,
    tracing: legs.tracing,
  });
  const models = createModelsRoute({
    retry: legs.retry,
    upstream,
    log: surroundings.log,
    pool: decoders,
    clock: surroundings.clock,
    limitBytes: limits.heldAnswerLengthBytes,
    timeoutMs: timeouts.firstByteMs,
  });
  const health = createHealthChecks([prefillers, decoders], upstream, settings.health, surroundings);
  const discovered = discovery === undefined ? undefined : followDiscovery(discovery, pools, surroundings);

  const startedAtMs = surroundings.clock.now();
  let draining = false;
  const status = (): ProxyStatus => ({
    flow: flow.name,
    routing: decoders.routing,
    draining,
    uptime_s: (surroundings.clock.now() - startedAtMs) / 1000,
    requests: traffic.status(),
    prefillers: prefillers.status(),
    decoders: decoders.status(),
  });
  const server = createServer({
    clock: surroundings.clock,
    limits,
    timeouts,
    generation,
    models,
    newRequestId: surroundings.random.uuid,
    isDraining: () => draining,
    health: () => {
      const [prefill, decode] = [prefillers.available(), decoders.available()];
      const ok = prefill > 0 && decode > 0 && !draining;
      return { ok, status: ok ? "ok" : "unavailable", prefill_instances: prefill, decode_instances: decode };
    },
    status,
  });
  const adminApp =
    admin === undefined
      ? undefined
      : createAdminServer({
          token: admin.token,
          clock: surroundings.clock,
          pools,
          status,
          recent,
          prometheus,
        });

  let closing: Promise<void> | undefined;
  async function closeAll(): Promise<void> {
    generation.refuse(closingError("the proxy is closing"));
    health.close();
    discovered?.close();
    await generation.idle();
    await flow.settled();
    await closeServer(server);
    await adminApp?.close();
    await upstream.close();
    routings.prefill.close?.();
    routings.decode.close?.();
  }
  return {
    async listen({ host = "127.0.0.1", port = 8000 } = {}) {
      const address = await listening(host, port, () => listen(server, { host, port }), server);
      if (admin === undefined || adminApp === undefined) return address;
      const start = () => adminApp.listen({ host: admin.host, port: admin.port });
      try {
        const { url: adminUrl } = await listening(admin.host, admin.port, start, adminApp.server);
        return { ...address, adminUrl };
      } catch (error) {
        // Half of it would serve clients, and nobody could see or change it.
        const closed = closeServer(server);
        server.closeAllConnections();
        await closed;
        throw error;
      }
    },
    status,
    instances: pools,
    async close({ graceMs = timeouts.graceMs } = {}) {
      draining = true;
      const timer = surroundings.clock.setTimer(() => {
        generation.abortAll(closingError("the proxy is closing and the time for requests in flight is up"));
        // A client that has not sent its request whole by now; Node's own watch over it ends when the server begins to close.
        void generation.idle().then(() => server.closeAllConnections());
      }, graceMs);
      closing ??= closeAll();
      await closing.finally(timer.cancel);
    },
  };
}

const ORDERS = {
  pull: createPullOrder,
  push: createPushOrder,
  auto: createAutoOrder,
} as const satisfies Record<ProxySettings["mode"], (options: PushOrderOptions) => LegOrder>;

async function listening(
  host: string,
  port: number,
  start: () => Promise<unknown>,
  server: Server,
): Promise<ProxyAddress> {
  try {
    await start();
  } catch (cause) {
    const { code } = cause as { code?: string };
    const hint =
      code === "EADDRINUSE"
        ? "stop what listens there, or choose another port"
        : "choose a host and a port of this machine";
    const message = `the proxy cannot listen on ${host}:${port} (${code ?? cause})`;
    throw new KvError("KV_CONFIG_INVALID", message, { hint, cause });
  }
  const address = server.address() as AddressInfo;
  const name = host.includes(":") ? `[${host}]` : host;
  return { host, port: address.port, url: `http://${name}:${address.port}` };
}

function closingError(message: string): KvError {
  return new KvError("KV_REQUEST_ABORTED", message, {
    hint: "send it to another proxy",
    details: { httpStatus: 503 },
  });
}

function refuseNone(settings: ProxySettings): void {
  for (const role of ["prefillers", "decoders"] as const) {
    if (settings[role].length > 0) continue;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `the setting ${role} names no instance, and there is no discovery`,
      {
        hint: `give one in ${role}, or set discovery`,
      },
    );
  }
}

function definedOnly(given: { [K in keyof Ambient]?: Ambient[K] | undefined }): Partial<Ambient> {
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));
}
