import { instanceSpecSchema, PAIRING_MODES, ROUTING_NAMES } from "@kv/fleet";
import { KvError } from "@kv/interface";
import { z } from "zod";
import { mayForward } from "../http/headers.js";

const bytes = z.number().int().positive();
const count = z.number().int().positive();
const milliseconds = z.number().positive().max(86_400_000);

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
  /** To connect to an instance. */
  connectMs: milliseconds.default(5_000),
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
  /** How long an instance that could not be reached is left out, while there is another; doubles with each failure in a row. */
  coolDownMs: milliseconds.default(1_000),
  /** The longest cool-down. */
  maxCoolDownMs: milliseconds.default(30_000),
  /** How long an instance that is back from ejection takes a growing share of the requests. */
  slowReturnMs: milliseconds.default(10_000),
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

const healthSchema = z.strictObject({
  /** Between two checks of an instance; 0 disables them. */
  intervalMs: z.number().nonnegative().max(86_400_000).default(5_000),
  timeoutMs: milliseconds.default(3_000),
  path: z.string().startsWith("/").default("/health"),
  /** Failed checks in a row that eject an instance; the first good one takes it back. */
  failures: z.number().int().positive().default(2),
});

const pairingSchema = z.strictObject({
  /**
   * What pairs with an instance whose side channel was never read, because its address is not known or it cannot be reached: every instance (`lenient`),
   * those with its label, or none (`strict`). `off`: no side channel is read, and all instances pair.
   */
  mode: z.enum(PAIRING_MODES).default("lenient"),
  /** For one reading of a side channel. */
  timeoutMs: milliseconds.default(3_000),
  /** Between two readings of an engine that shows no sign of a restart. */
  refreshMs: milliseconds.default(60_000),
});

const portName = z.union([z.number().int().min(1).max(65_535), z.string().min(1).max(63)]);
const labelName = z.string().min(1).max(317);
const serviceName = z.string().regex(/^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$/);

/** The options of `kubernetesDiscovery`. */
const kubernetesSchema = z
  .strictObject({
    kubeconfig: z.string().optional(),
    context: z.string().optional(),
    namespace: serviceName.optional(),
    podSelector: z.string().min(1).optional(),
    services: z.strictObject({ prefill: serviceName, decode: serviceName }).optional(),
    port: z.union([portName, z.strictObject({ prefill: portName, decode: portName })]).optional(),
    sideChannelPort: portName.optional(),
    roleLabel: labelName.optional(),
    revisionLabel: labelName.optional(),
    dataParallelLabel: labelName.optional(),
    ipFamily: z.union([z.literal(4), z.literal(6)]).optional(),
  })
  .refine(
    ({ podSelector, services }) => (podSelector === undefined) !== (services === undefined),
    "give either podSelector or services",
  );

const discoverySchema = z
  .strictObject({
    /** A JSON file `{"prefillers": […], "decoders": […]}`. */
    file: z.string().optional(),
    /** DNS names whose addresses are instances: `host:port`, or the name of SRV records. */
    dns: z.strictObject({ prefill: z.string(), decode: z.string() }).optional(),
    /** Pods, or the EndpointSlices of services, in a Kubernetes cluster. */
    kubernetes: kubernetesSchema.optional(),
    /** Between two reads of a file or of DNS. Kubernetes tells changes. */
    intervalMs: milliseconds.default(5_000),
  })
  .refine(
    (given) => [given.file, given.dns, given.kubernetes].filter((one) => one !== undefined).length === 1,
    "give one of file, dns and kubernetes",
  );

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
  /** Side-channel port and TP size of the engines of all prefill instances, as in `kv` of an instance. */
  kv: z
    .strictObject({
      port: z.number().int().min(1).max(65_535).optional(),
      tpSize: z.number().int().min(1).max(65_536).optional(),
    })
    .optional(),
});

const routingSchema = z.enum(ROUTING_NAMES);

/** The settings of the proxy, as a zod schema. */
export const proxySettingsSchema = z.strictObject({
  /** `host:port` or `http(s)://host:port[/path]`, where a `/v1` at the end is dropped; `@RANK` after it is a data-parallel rank. */
  prefillers: z.array(instanceSpecSchema).default([]),
  decoders: z.array(instanceSpecSchema).default([]),
  /**
   * How the KV is transferred, which decides the order of the legs: `pull` for vLLM's NixlConnector, `push` for its NixlPushConnector, `auto` by
   * the answers of each prefill instance.
   */
  mode: z.enum(MODES).default("pull"),
  /** For push: both legs at once, or the decode leg after the prefill leg has answered. */
  pushLegs: z.enum(PUSH_LEGS).default("at-once"),
  /**
   * A prompt with more uncached tokens than this has two legs. Without it, all have. A decode instance alone serves a shorter one, one that it has in
   * its prefix cache, and one that would wait for a prefill instance longer than the decode instance computes.
   */
  disaggregateAbove: z.number().int().nonnegative().optional(),
  routing: z
    .strictObject({
      prefill: routingSchema.default("round-robin"),
      decode: routingSchema.default("round-robin"),
    })
    .prefault({}),
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
  health: healthSchema.prefault({}),
  /** Which prefill instances serve with which decode instances. */
  pairing: pairingSchema.prefault({}),
  discovery: discoverySchema.optional(),
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

/** A configuration file: the settings, and where to listen. */
export const proxyFileSchema = proxySettingsSchema.extend({
  host: z.string().default("127.0.0.1"),
  port: z.number().int().min(0).max(65_535).default(8_000),
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
  let input: unknown;
  try {
    input = JSON.parse(readFile(path));
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `${path} cannot be read as JSON: ${(cause as Error).message}`, {
      cause,
    });
  }
  parse(proxyFileSchema, input, `${path} is`);
  const { $schema: _, ...file } = input as ProxyFileInput;
  return file;
}

/** Checks settings and fills in defaults. Errors: `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting. */
export function readSettings(input: unknown): ProxySettings {
  const settings = parse(proxySettingsSchema, input, "the proxy's settings are");
  requireSidecar(settings);
  requireAdminToken(settings);
  requireRoomForBody(settings);
  return settings;
}

function parse<S extends z.ZodType>(schema: S, input: unknown, subject: string): z.output<S> {
  const result = schema.safeParse(input);
  if (result.success) return result.data;
  const problems = result.error.issues.map(
    (issue) => `${issue.path.join(".") || "settings"}: ${issue.message}`,
  );
  const unknown = result.error.issues.some((issue) => issue.code === "unrecognized_keys");
  throw new KvError(
    unknown ? "KV_CONFIG_UNKNOWN_KEY" : "KV_CONFIG_INVALID",
    `${subject} not valid: ${problems.join("; ")}`,
    { hint: "each setting is described in the README of @kv/proxy", details: { problems } },
  );
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
