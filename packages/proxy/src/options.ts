import { KvError } from "@kv/interface";
import { z } from "zod";
import { instanceSpecSchema } from "./instance-spec.js";

const bytes = z.number().int().positive();
const milliseconds = z.number().positive().max(86_400_000);

const limitsSchema = z.strictObject({
  /** A client's body; larger ones are answered 413. */
  bodyLengthBytes: bytes.default(64 * 1024 * 1024),
  /** A client's request line and headers; larger ones are answered 431. */
  headersLengthBytes: bytes.default(32 * 1024),
  /** A prefill worker's answer, which may repeat the prompt's token ids. */
  prefillAnswerLengthBytes: bytes.default(32 * 1024 * 1024),
  /** How much of a decode worker's unstreamed answer is checked before any of it leaves. */
  heldAnswerLengthBytes: bytes.default(4 * 1024 * 1024),
  /** All answers to the parts of one request together, where they are merged and not streamed. */
  mergedAnswerLengthBytes: bytes.default(64 * 1024 * 1024),
  /** One event of a stream that is merged with others. */
  eventLengthBytes: bytes.default(1024 * 1024),
  /** Prompts times copies (`n`) in one request. */
  parts: z.number().int().positive().default(256),
});

const timeoutsSchema = z.strictObject({
  /** To reach an instance. */
  connectMs: milliseconds.default(5_000),
  /** The prefill leg, queueing in the worker included. */
  prefillMs: milliseconds.default(300_000),
  /** From the decode leg's begin to the first byte of its answer. */
  firstByteMs: milliseconds.default(300_000),
  /** Between two pieces of a decode worker's answer. */
  stallMs: milliseconds.default(120_000),
  /** A request as a whole, a client that reads slowly included. */
  requestMs: milliseconds.default(3_600_000),
  /** For a client to send its request. */
  receiveMs: milliseconds.default(60_000),
  /**
   * How long a client's connection may wait for its next request. Longer than clients and load balancers keep theirs (OpenAI's for Python:
   * 5 s, many balancers: 60 s): a request that meets its connection's end is lost.
   */
  keepAliveMs: milliseconds.default(75_000),
  /** How long a prefill worker surely holds blocks for a decode leg: its `kv_lease_duration` (vLLM: 30 s) less a margin. */
  leaseMs: milliseconds.default(25_000),
  /** For the leg that frees blocks which nobody will read. */
  releaseMs: milliseconds.default(10_000),
  /** How long an instance that could not be reached is left out, while there is another; doubles with each failure in a row. */
  coolDownMs: milliseconds.default(1_000),
  maxCoolDownMs: milliseconds.default(30_000),
  /** Over how long an instance that was ejected takes a growing share of the requests when it is back. */
  slowReturnMs: milliseconds.default(10_000),
  /** What `close` leaves requests in flight to end by themselves. */
  graceMs: milliseconds.default(30_000),
});

const whoComputes = z.enum(["fail", "decode-computes"]).default("fail");

const policySchema = z.strictObject({
  /** The prefill worker answered without KV parameters: an error (502), or the decode worker computes the prompt itself. */
  missingKv: whoComputes,
  /** The request cannot be parted (several prompts, n > 1, prompt_logprobs, …): an error (400), or a decode worker serves it alone. */
  unsplittable: whoComputes,
});

const healthSchema = z.strictObject({
  /** Between two checks of an instance; 0: none. */
  intervalMs: z.number().nonnegative().max(86_400_000).default(5_000),
  timeoutMs: milliseconds.default(3_000),
  path: z.string().startsWith("/").default("/health"),
  /** Bad checks in a row that eject an instance; a good one takes it back. */
  failures: z.number().int().positive().default(2),
});

const discoverySchema = z
  .strictObject({
    /** A JSON file `{"prefillers": […], "decoders": […]}`. */
    file: z.string().optional(),
    /** Names whose addresses are instances: `host:port`, or the name of SRV records. */
    dns: z.strictObject({ prefill: z.string(), decode: z.string() }).optional(),
    intervalMs: milliseconds.default(5_000),
  })
  .refine(({ file, dns }) => (file === undefined) !== (dns === undefined), "give either file or dns");

const adminSchema = z.strictObject({
  host: z.string().default("127.0.0.1"),
  /** 0 takes a free one. */
  port: z.number().int().min(0).max(65_535),
  /** What `Authorization: Bearer` must hold. Required where the host is not the loopback. */
  token: z.string().min(16).optional(),
});

export const ROUTING_NAMES = ["round-robin", "least-load", "session-affinity", "prefix-aware"] as const;
export const MODES = ["pull", "push", "auto"] as const;
export const PUSH_LEGS = ["at-once", "prefill-first"] as const;
const routingSchema = z.enum(ROUTING_NAMES);

export const proxySettingsSchema = z.strictObject({
  /** `host:port` or `http(s)://host:port[/path]`, a `/v1` at the end is dropped; `@RANK` after it is a data-parallel rank. */
  prefillers: z.array(instanceSpecSchema).default([]),
  decoders: z.array(instanceSpecSchema).default([]),
  /**
   * Which way the KV goes, which decides the order of the legs: `pull` as vLLM's NixlConnector, `push` as its NixlPushConnector, `auto` as
   * each prefill instance says in its answers.
   */
  mode: z.enum(MODES).default("pull"),
  /** Of push: both legs at once, or the decode leg when the prefill leg has answered. */
  pushLegs: z.enum(PUSH_LEGS).default("at-once"),
  routing: z
    .strictObject({
      prefill: routingSchema.default("round-robin"),
      decode: routingSchema.default("round-robin"),
    })
    .prefault({}),
  limits: limitsSchema.prefault({}),
  timeouts: timeoutsSchema.prefault({}),
  policy: policySchema.prefault({}),
  health: healthSchema.prefault({}),
  discovery: discoverySchema.optional(),
  admin: adminSchema.optional(),
});

/** A configuration file: the settings, and where to listen. */
export const proxyFileSchema = proxySettingsSchema.extend({
  host: z.string().default("127.0.0.1"),
  port: z.number().int().min(0).max(65_535).default(8_000),
  /** For an editor. */
  $schema: z.string().optional(),
});

/** What a configuration file or a command line can say; every part but the two lists has a default. */
export type ProxySettingsInput = z.input<typeof proxySettingsSchema>;
export type ProxySettings = z.output<typeof proxySettingsSchema>;
export type ProxyLimits = ProxySettings["limits"];
export type ProxyTimeouts = ProxySettings["timeouts"];
export type ProxyPolicy = ProxySettings["policy"];
export type RoutingName = z.infer<typeof routingSchema>;

/** What a configuration file holds, as it was written. */
export type ProxyFileInput = z.input<typeof proxyFileSchema>;

/** Reads a configuration file. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`, naming the file. */
export function readConfigFile(path: string, readFile: (path: string) => string): ProxyFileInput {
  let input: unknown;
  try {
    input = JSON.parse(readFile(path));
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `${path} cannot be read as JSON: ${(cause as Error).message}`, {
      cause,
    });
  }
  checked(proxyFileSchema, input, `${path} is`);
  const { $schema: _, ...file } = input as ProxyFileInput;
  return file;
}

/** Errors: `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, naming each setting that is wrong. */
export function readSettings(input: unknown): ProxySettings {
  const settings = checked(proxySettingsSchema, input, "the proxy's settings are");
  refuseOpenAdmin(settings);
  return settings;
}

function checked<S extends z.ZodType>(schema: S, input: unknown, what: string): z.output<S> {
  const result = schema.safeParse(input);
  if (result.success) return result.data;
  const problems = result.error.issues.map(
    (issue) => `${issue.path.join(".") || "settings"}: ${issue.message}`,
  );
  const unknown = result.error.issues.some((issue) => issue.code === "unrecognized_keys");
  throw new KvError(
    unknown ? "KV_CONFIG_UNKNOWN_KEY" : "KV_CONFIG_INVALID",
    `${what} not valid: ${problems.join("; ")}`,
    { hint: "each setting is described in the README of @kv/proxy", details: { problems } },
  );
}

function refuseOpenAdmin({ admin }: ProxySettings): void {
  if (admin === undefined || admin.token !== undefined || /^(127\.|::1$|localhost$)/.test(admin.host)) return;
  throw new KvError("KV_CONFIG_INVALID", `admin.host is ${admin.host}, and there is no admin.token`, {
    hint: "give a token of 16 characters or more, or keep the admin routes on 127.0.0.1",
  });
}
