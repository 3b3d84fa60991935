import type { AddressInfo } from "node:net";
import { type Ambient, ambient as fillAmbient, KvError } from "@kv/interface";
import { createGenerationFlow } from "./generation-flow.js";
import { createGenerationRoute } from "./generation-route.js";
import { instanceUrl } from "./instance-url.js";
import { createInstancePool, type InstanceStatus } from "./instances.js";
import type { LegOrder, LegOrderOptions } from "./leg-order.js";
import { createModelsRoute } from "./models-route.js";
import { type ProxySettingsInput, readSettings } from "./options.js";
import { createPullOrder } from "./pull-order.js";
import { type RetryPolicy, retryWhereSafe } from "./retry.js";
import { type Routing, roundRobin } from "./routing.js";
import { createServer } from "./server.js";
import { openTelemetryTracing } from "./tracing.js";
import { createTraffic, type TrafficStatus } from "./traffic.js";
import { createHttpUpstream, type Upstream } from "./upstream.js";

export interface ProxyOptions extends ProxySettingsInput, Partial<Ambient> {
  /** Called once for each role; round robin by default. */
  readonly createRouting?: () => Routing;
  readonly retry?: RetryPolicy;
  /** How instances are reached; HTTP by default. The proxy closes it. */
  readonly upstream?: Upstream;
  /** The order of the legs; pull by default. */
  readonly createLegOrder?: (options: LegOrderOptions) => LegOrder;
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
}

export interface Proxy {
  /** Port 0 takes a free one. Errors: `KV_CONFIG_INVALID` when the port is taken or the host is not this machine's. */
  listen(options?: { host?: string; port?: number }): Promise<ProxyAddress>;
  status(): ProxyStatus;
  /**
   * Refuses further requests (503), leaves those in flight `graceMs` (default: the settings') to end, aborts the rest. Safe to call
   * twice; the second call may shorten the grace.
   */
  close(options?: { graceMs?: number }): Promise<void>;
}

/** A prefill/decode router in front of OpenAI-style servers. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`. */
export function createProxy(options: ProxyOptions): Proxy {
  const {
    clock,
    random,
    log,
    metrics,
    createRouting,
    retry,
    upstream: given,
    createLegOrder,
    ...input
  } = options;
  const settings = readSettings(input);
  const { limits, timeouts, policy } = settings;
  const surroundings = fillAmbient(definedOnly({ clock, random, log, metrics }));
  const pool = (role: "prefill" | "decode", urls: readonly string[]) =>
    createInstancePool({
      role,
      urls: distinct(role, urls.map(instanceUrl)),
      routing: (createRouting ?? roundRobin)(),
      clock: surroundings.clock,
      coolDownMs: timeouts.coolDownMs,
    });
  const prefillers = pool("prefill", settings.prefillers);
  const decoders = pool("decode", settings.decoders);
  const upstream = given ?? createHttpUpstream({ connectMs: timeouts.connectMs });
  const traffic = createTraffic();
  const legs = { retry: retry ?? retryWhereSafe, upstream, log: surroundings.log };
  const legOptions: LegOrderOptions = {
    retry: legs.retry,
    upstream,
    tracing: openTelemetryTracing(),
    ambient: surroundings,
    prefillers,
    decoders,
    limits,
    timeouts,
    policy,
  };
  const flow = createGenerationFlow(legOptions, (createLegOrder ?? createPullOrder)(legOptions));
  const generation = createGenerationRoute({
    ambient: surroundings,
    flow,
    traffic,
    requestMs: timeouts.requestMs,
  });
  const models = createModelsRoute({
    ...legs,
    pool: decoders,
    clock: surroundings.clock,
    limitBytes: limits.heldAnswerLengthBytes,
    timeoutMs: timeouts.firstByteMs,
  });
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
  const app = createServer({
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

  let closing: Promise<void> | undefined;
  async function closeAll(): Promise<void> {
    generation.refuse(closingError("the proxy is closing"));
    await generation.idle();
    await flow.settled();
    await app.close();
    await upstream.close();
  }
  return {
    async listen({ host = "127.0.0.1", port = 8000 } = {}) {
      try {
        await app.listen({ host, port });
      } catch (cause) {
        const { code } = cause as { code?: string };
        const taken = code === "EADDRINUSE";
        throw new KvError(
          "KV_CONFIG_INVALID",
          `the proxy cannot listen on ${host}:${port} (${code ?? cause})`,
          {
            hint: taken
              ? "stop what listens there, or choose another port"
              : "choose a host and a port of this machine",
            cause,
          },
        );
      }
      const address = app.server.address() as AddressInfo;
      const name = host.includes(":") ? `[${host}]` : host;
      return { host, port: address.port, url: `http://${name}:${address.port}` };
    },
    status,
    async close({ graceMs = timeouts.graceMs } = {}) {
      draining = true;
      const timer = surroundings.clock.setTimer(() => {
        generation.abortAll(closingError("the proxy is closing and the time for requests in flight is up"));
      }, graceMs);
      closing ??= closeAll();
      await closing.finally(timer.cancel);
    },
  };
}

function closingError(message: string): KvError {
  return new KvError("KV_REQUEST_ABORTED", message, {
    hint: "send it to another proxy",
    details: { httpStatus: 503 },
  });
}

function distinct(role: string, urls: readonly string[]): readonly string[] {
  const twice = urls.find((url, at) => urls.indexOf(url) !== at);
  if (twice === undefined) return urls;
  throw new KvError("KV_CONFIG_INVALID", `the ${role} instance ${twice} is given twice`, {
    hint: "name each instance once",
  });
}

function definedOnly(given: { [K in keyof Ambient]: Ambient[K] | undefined }): Partial<Ambient> {
  return Object.fromEntries(Object.entries(given).filter(([, value]) => value !== undefined));
}
