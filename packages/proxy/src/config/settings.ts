import {
  fleetSettings,
  instanceTimes,
  mayForward,
  milliseconds,
  parseSettings,
  readJsonFile,
} from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { z } from "zod";

const bytes = z.number().int().positive();
const count = z.number().int().positive();

const limitsSchema = z.strictObject({
  /** A client's body; a larger one is answered with 413. */
  bodyLengthBytes: bytes.default(16 * 1024 * 1024),
  /** The bodies of all requests together, until each has its answer; the largest that is still arriving is refused with 503. */
  bodiesLengthBytes: bytes.default(128 * 1024 * 1024),
  /** The bodies of one client together; the largest that is still arriving is refused with 429. By default 64 MiB. */
  bodiesPerClientLengthBytes: bytes.optional(),
  /** Objects and lists inside of one another, in a body. */
  bodyDepth: count.default(100),
  /** Members of objects, and objects and lists, in a body. */
  bodyMembers: count.default(100_000),
  /** Elements of lists and members of objects, such as token ids, in a body. */
  bodyValues: count.default(2 * 1024 * 1024),
  /** Clients' connections. By default half of the process's descriptors, a third unless `mode` is `pull`, 10,000 at most. */
  connections: count.optional(),
  /** Connections from one address; of an IPv6 address 64 bits count. By default half of `connections`. */
  connectionsPerAddress: count.optional(),
  /** Requests on one connection that wait for the answers before them; above it, the connection is closed. */
  pipelinedRequests: z.number().int().nonnegative().default(16),
  /** Requests in flight, each part counted; more are answered with 503. By default as many as `connections` has by default. */
  requestsInFlight: count.optional(),
  /** Requests in flight of one client; more are answered with 429. By default half of `requestsInFlight`. */
  requestsPerClient: count.optional(),
  /** How many requests a client may leave before their answers begin, within `timeouts.abandonedWindowMs`; then 429. By default 30. */
  abandonedPrefills: count.optional(),
  /**
   * The header by which a trusted front end names the client, for the limits per client. By default, the client is its address. A client that
   * reaches the proxy without the front end could choose its name.
   */
  clientHeader: z
    .string()
    .regex(/^[A-Za-z0-9-]+$/)
    .transform((name) => name.toLowerCase())
    .optional(),
  /** A client's request line and headers; larger ones are answered with 431. */
  headersLengthBytes: bytes.default(32 * 1024),
  /** A prefill worker's answer, which may repeat the prompt's token ids. */
  prefillAnswerLengthBytes: bytes.default(32 * 1024 * 1024),
  /** The part of a decode worker's unstreamed answer that is checked before any of it leaves. */
  heldAnswerLengthBytes: bytes.default(4 * 1024 * 1024),
  /** All answers together that are merged into one unstreamed answer. */
  mergedAnswerLengthBytes: bytes.default(64 * 1024 * 1024),
  /** One event of a stream that is merged with others. */
  eventLengthBytes: bytes.default(1024 * 1024),
  /** Prompts times copies (`n`) in one request. */
  parts: z.number().int().positive().default(256),
});

const timeoutsSchema = z.strictObject({
  connectMs: instanceTimes.connectMs,
  /** The prefill leg, with the time in the worker's queue. */
  prefillMs: milliseconds.default(300_000),
  /** From the begin of the decode leg to the first byte of its answer. */
  firstByteMs: milliseconds.default(300_000),
  /** Between two chunks of a decode worker's answer, and for a client to read some of its answer. */
  stallMs: milliseconds.default(120_000),
  /** A whole request, with the time that a slow client takes to read. */
  requestMs: milliseconds.default(3_600_000),
  /** For a client to send the head of its request, from the connection's begin or the first byte. */
  headersMs: milliseconds.default(10_000),
  /** For a client to send its request. */
  receiveMs: milliseconds.default(60_000),
  /** For how long a request counts that a client left before its answer began. */
  abandonedWindowMs: milliseconds.default(30_000),
  /**
   * How long a client's idle connection is kept. Longer than clients and load balancers keep theirs (OpenAI's Python client 5 s, many
   * balancers 60 s), because a request that is sent while the connection closes is lost.
   */
  keepAliveMs: milliseconds.default(75_000),
  /** How long a prefill worker surely holds blocks for a decode leg: its `kv_lease_duration` (vLLM: 30 s) less a margin. */
  leaseMs: milliseconds.default(25_000),
  /** For the leg that frees blocks which no decode leg will read. */
  releaseMs: milliseconds.default(10_000),
  coolDownMs: instanceTimes.coolDownMs,
  maxCoolDownMs: instanceTimes.maxCoolDownMs,
  slowReturnMs: instanceTimes.slowReturnMs,
  /** How long `close` lets requests in flight end by themselves. */
  graceMs: milliseconds.default(30_000),
});

const fallback = z.enum(["fail", "decode-computes"]).default("fail");

const policySchema = z.strictObject({
  /** When the prefill worker answers without KV parameters: an error (502), or the decode worker computes the prompt. */
  missingKv: fallback,
  /** When prefill and decode of a request cannot be split (beam search, …): an error (400), or a decode worker serves it alone. */
  unsplittable: fallback,
});

const adminSchema = z.strictObject({
  host: z.string().default("127.0.0.1"),
  /** 0 takes a free port. */
  port: z.number().int().min(0).max(65_535),
  /** Required as `Authorization: Bearer TOKEN`. It must be set where the host is not the loopback. */
  token: z.string().min(16).optional(),
  /**
   * Names of this host that a `Host` header may have, besides `localhost`, IP addresses and `host`. Without a token no other name is served;
   * with one, only where this list is set.
   */
  allowedHosts: z.array(z.string().regex(/^[A-Za-z0-9._-]+$/)).default([]),
});

const corsSchema = z.strictObject({
  /** Origins such as `https://chat.example.org`, whose pages may read answers; `*` for all. */
  origins: z
    .array(z.string().regex(/^(\*|https?:\/\/[^/?#\s]+)$/, "give scheme://host[:port], without a path, or *"))
    .min(1),
});

const instanceRoutesSchema = z.strictObject({
  /** Required as `Authorization: Bearer TOKEN`. */
  token: z.string().min(16).optional(),
});

/** Values of `mode`. */
export const MODES = ["pull", "push", "auto"] as const;
/** Values of `pushLegs`. */
export const PUSH_LEGS = ["at-once", "prefill-first"] as const;
/** An entry of an `Allowlist`, which checks it. */
const allowEntry = z.string().min(1).max(256);

const sidecarSchema = z.strictObject({
  /**
   * The prefill instances that requests may name: addresses, blocks such as `10.0.0.0/8`, names, `*.SUFFIX` or `*`, each with `:PORT` for one port only. Those that
   * `discovery` finds are allowed besides.
   */
  allow: z.array(allowEntry).max(1024).default([]),
  /** Whether prefill instances are reached by HTTPS. */
  prefillTls: z.boolean().default(false),
  /** Whether its own port speaks TLS: `true` with a certificate that is made at the start, or with one of files, which are read again when they change. */
  tls: z
    .union([
      z.boolean(),
      z.strictObject({
        /** PEM file of the certificate and its chain. */
        certFile: z.string().min(1),
        /** PEM file of its key. */
        keyFile: z.string().min(1),
      }),
    ])
    .default(false),
  /** Side-channel port and TP size of the engines of all prefill instances, as in `kv` of an instance. */
  kv: z
    .strictObject({
      port: z.number().int().min(1).max(65_535).optional(),
      tpSize: z.number().int().min(1).max(65_536).optional(),
    })
    .optional(),
});

/** The settings of the proxy, as a zod schema. */
export const proxySettingsSchema = z.strictObject({
  prefillers: fleetSettings.prefillers,
  decoders: fleetSettings.decoders,
  /**
   * How the KV is transferred, which decides the order of the legs: `pull` for vLLM's NixlConnector, `push` for its NixlPushConnector, `auto` by
   * the answers of each prefill instance.
   */
  mode: z.enum(MODES).default("pull"),
  /** For push: both legs at once, or the decode leg after the prefill leg has answered. */
  pushLegs: z.enum(PUSH_LEGS).default("at-once"),
  disaggregateAbove: fleetSettings.disaggregateAbove,
  routing: fleetSettings.routing,
  limits: limitsSchema.prefault({}),
  timeouts: timeoutsSchema.prefault({}),
  policy: policySchema.prefault({}),
  /**
   * Further headers of clients that instances get, such as `authorization`. Always forwarded are `accept`, `traceparent`, `tracestate`, `baggage`
   * and `x-data-parallel-rank`.
   */
  forwardHeaders: z
    .array(
      z
        .string()
        .regex(/^[A-Za-z0-9-]+$/)
        .refine(mayForward, "the proxy sets this header itself, or it belongs to one connection"),
    )
    .default([]),
  /** Whether errors to clients and `GET /status` name instances and their addresses. The admin routes and the log always do. */
  exposeInstances: z.boolean().default(false),
  health: fleetSettings.health,
  pairing: fleetSettings.pairing,
  discovery: fleetSettings.discovery,
  admin: adminSchema.optional(),
  /** Lets web pages of other origins use the routes for clients. By default, browsers refuse them. */
  cors: corsSchema.optional(),
  /**
   * Stands on the port of one decode instance. Requests name their prefill instances in the header `x-prefiller-host-port`, as llm-d's picker does; without it, the
   * decode instance computes alone.
   */
  sidecar: sidecarSchema.optional(),
  /** Serves `/instances/add`, `/drain` and `/remove` to clients too, as vLLM's push proxy does. */
  instanceRoutes: instanceRoutesSchema.optional(),
});

/** The most processes that one port is served by. */
export const MAX_WORKERS = 64;

/** A configuration file: the settings, and where to listen. */
export const proxyFileSchema = proxySettingsSchema.extend({
  host: z.string().default("127.0.0.1"),
  port: z.number().int().min(0).max(65_535).default(8_000),
  /** Processes that serve the port. */
  workers: z.number().int().min(1).max(MAX_WORKERS).default(1),
  /** For editors. */
  $schema: z.string().optional(),
});

/** The settings as a program, a configuration file or a command line gives them; each member has a default. */
export type ProxySettingsInput = z.input<typeof proxySettingsSchema>;
/** The settings with their defaults. */
export type ProxySettings = z.output<typeof proxySettingsSchema>;

/** The content of a configuration file. */
export type ProxyFileInput = z.input<typeof proxyFileSchema>;

/** Reads a configuration file. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`, both with the file's name. */
export function readConfigFile(path: string, readFile: (path: string) => string): ProxyFileInput {
  const input = readJsonFile(path, readFile);
  parseSettings(proxyFileSchema, input, { subject: `${path} is`, readme: "@kv/proxy" });
  const { $schema: _, ...file } = input as ProxyFileInput;
  return file;
}

/** Checks settings and fills in defaults. Errors: `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting. */
export function readSettings(input: unknown): ProxySettings {
  const settings = parseSettings(proxySettingsSchema, input, {
    subject: "the proxy's settings are",
    readme: "@kv/proxy",
  });
  requireSidecar(settings);
  requireAdminToken(settings);
  requireRoomForBody(settings);
  return settings;
}

/** Default of `limits.bodiesPerClientLengthBytes`. */
export const BODIES_PER_CLIENT_BYTES = 64 * 1024 * 1024;

/** Whether all clients count as one: those of a sidecar are gateways, and no header names the clients behind them. */
export function isOneClient({ sidecar, limits }: Pick<ProxySettings, "sidecar" | "limits">): boolean {
  return sidecar !== undefined && limits.clientHeader === undefined;
}

/** `limits.bodiesPerClientLengthBytes`, or its default. */
export function bodiesPerClientBytes(settings: Pick<ProxySettings, "sidecar" | "limits">): number {
  const { bodiesPerClientLengthBytes: given, bodiesLengthBytes } = settings.limits;
  return given ?? (isOneClient(settings) ? bodiesLengthBytes : BODIES_PER_CLIENT_BYTES);
}

/** A body that is larger than the memory for bodies would always be refused, with a status that says that it might be served later. */
function requireRoomForBody(settings: ProxySettings): void {
  const { bodyLengthBytes, bodiesLengthBytes: all } = settings.limits;
  const perClient = bodiesPerClientBytes(settings);
  if (bodyLengthBytes <= Math.min(perClient, all)) return;
  const name = perClient <= all ? "bodiesPerClientLengthBytes" : "bodiesLengthBytes";
  const message = `limits.bodyLengthBytes is ${bodyLengthBytes}, above limits.${name}, which is ${Math.min(perClient, all)}`;
  throw new KvError("KV_CONFIG_INVALID", message, { hint: `raise limits.${name} with it` });
}

function requireSidecar({ sidecar, decoders, prefillers }: ProxySettings): void {
  if (sidecar === undefined) return;
  const invalid = (message: string, hint: string) => new KvError("KV_CONFIG_INVALID", message, { hint });
  if (decoders.length !== 1)
    throw invalid(
      `a sidecar has one decode instance, and decoders names ${decoders.length}`,
      "start one sidecar beside each decode instance",
    );
  if (prefillers.length > 0)
    throw invalid(
      "a sidecar takes no prefillers: requests name them in the header x-prefiller-host-port",
      "name the allowed ones in sidecar.allow (--allow-prefill)",
    );
}

function requireAdminToken({ admin }: ProxySettings): void {
  if (admin === undefined || admin.token !== undefined || /^(127\.|::1$|localhost$)/.test(admin.host)) return;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `admin.host is ${admin.host}, which is not the loopback, but admin.token is not set`,
    {
      hint: "set a token of 16 characters or more, or keep the admin routes on 127.0.0.1",
    },
  );
}
