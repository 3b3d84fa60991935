import { fleetSettings, instanceTimes, milliseconds, parseSettings, readJsonFile } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { z } from "zod";

const bytes = z.number().int().positive();
const count = z.number().int().positive();

const limitsSchema = z.strictObject({
  /** Connections of gateways. */
  connections: count.default(1_024),
  /** Connections of one address; by default half of `connections`. */
  connectionsPerAddress: count.optional(),
  /** Requests at once on one connection; a gateway opens further connections for more. */
  requestsPerConnection: count.default(10_000),
  /** Requests in flight, until the end of their answers; more are answered with 429. */
  requestsInFlight: count.default(20_000),
  /** Requests in flight at one decode instance, as far as this picker has sent them there. Where all have so many, requests are answered with 429. */
  requestsPerDecode: count.optional(),
  /** A client's body; a larger one is answered with 413. */
  bodyLengthBytes: bytes.default(16 * 1024 * 1024),
  /** The bodies of all requests together, until they are passed on; the largest that is still arriving is refused with 429. */
  bodiesLengthBytes: bytes.default(256 * 1024 * 1024),
  /** Objects and lists inside of one another, in a body. */
  bodyDepth: count.default(100),
  /** Members of objects, and objects and lists, in a body. */
  bodyMembers: count.default(100_000),
  /** Elements of lists and members of objects, such as token ids, in a body. */
  bodyValues: count.default(2 * 1024 * 1024),
  /** A message of a gateway. */
  messageLengthBytes: bytes.default(4 * 1024 * 1024),
  /** Endpoints of a subset hint; a longer one is answered with 400. */
  subsetEndpoints: count.default(20_000),
});

const timeoutsSchema = z.strictObject({
  ...instanceTimes,
  /** For a body to arrive; then the client gets 408. */
  receiveMs: milliseconds.default(60_000),
  /** How long a connection without a request is kept. */
  idleMs: milliseconds.default(300_000),
  /** After SIGTERM: how long health says NOT_SERVING while requests are still taken, so that gateways notice. */
  drainMs: z.number().nonnegative().max(86_400_000).default(2_000),
  /** After that: how long requests in flight may take to end. */
  graceMs: milliseconds.default(30_000),
});

const tlsSchema = z.strictObject({
  /** PEM file of the certificate and its chain. It is read again when it changes. */
  certFile: z.string().min(1),
  /** PEM file of its key. */
  keyFile: z.string().min(1),
});

const metricsSchema = z.strictObject({
  host: z.string().default("127.0.0.1"),
  /** 0 takes a free one. */
  port: z.number().int().min(0).max(65_535),
});

/** The settings of the picker, as a zod schema. */
export const pickerSettingsSchema = z.strictObject({
  prefillers: fleetSettings.prefillers,
  decoders: fleetSettings.decoders,
  disaggregateAbove: fleetSettings.disaggregateAbove,
  routing: fleetSettings.routing,
  limits: limitsSchema.prefault({}),
  timeouts: timeoutsSchema.prefault({}),
  /** How many instances of each role are named beside the chosen one, for a gateway that tries again. */
  fallbacks: z.number().int().nonnegative().max(16).default(1),
  /** When prefill and decode of a request cannot be split: an error (400), or a decode instance serves it alone. */
  unsplittable: z.enum(["fail", "decode-computes"]).default("fail"),
  /** Further headers of clients that instances get with requests of the picker's own, such as `authorization` with `/render`. */
  forwardHeaders: z.array(z.string().regex(/^[A-Za-z0-9-]+$/)).default([]),
  /** Whether errors to clients name instances and their addresses. The log always does. */
  exposeInstances: z.boolean().default(false),
  health: fleetSettings.health,
  pairing: fleetSettings.pairing,
  discovery: fleetSettings.discovery,
  /** `true`: TLS with a certificate that is made at the start; `false`: none. */
  tls: z.union([z.boolean(), tlsSchema]).default(true),
  /** A listener for gRPC health alone, without TLS: probes of Kubernetes know no TLS. */
  healthPort: z.number().int().min(0).max(65_535).optional(),
  /** A listener for `/metrics`, `/status` and `/health` over HTTP. */
  metricsServer: metricsSchema.optional(),
});

/** A configuration file: the settings, and where to listen. */
export const pickerFileSchema = pickerSettingsSchema.extend({
  host: z.string().default("127.0.0.1"),
  port: z.number().int().min(0).max(65_535).default(9_002),
  /** For editors. */
  $schema: z.string().optional(),
});

/** The settings as a program, a configuration file or a command line gives them; each member has a default. */
export type PickerSettingsInput = z.input<typeof pickerSettingsSchema>;
/** The settings with their defaults. */
export type PickerSettings = Omit<z.output<typeof pickerSettingsSchema>, "limits"> & {
  /** What gateways and their clients can make the picker hold. */
  readonly limits: z.output<typeof limitsSchema> & { readonly connectionsPerAddress: number };
};
/** The content of a configuration file. */
export type PickerFileInput = z.input<typeof pickerFileSchema>;

const README = "@kv/epp";

/** Reads a configuration file. Errors: `KV_CONFIG_INVALID`, `KV_CONFIG_UNKNOWN_KEY`, both with the file's name. */
export function readConfigFile(path: string, readFile: (path: string) => string): PickerFileInput {
  const input = readJsonFile(path, readFile);
  parseSettings(pickerFileSchema, input, { subject: `${path} is`, readme: README });
  const { $schema: _, ...file } = input as PickerFileInput;
  return file;
}

/** Checks settings and fills in defaults. Errors: `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting. */
export function readSettings(input: unknown): PickerSettings {
  const settings = parseSettings(pickerSettingsSchema, input, {
    subject: "the picker's settings are",
    readme: README,
  });
  const { limits } = settings;
  const connectionsPerAddress = limits.connectionsPerAddress ?? Math.ceil(limits.connections / 2);
  const all = { ...limits, connectionsPerAddress };
  requireAtMost(all, "connectionsPerAddress", "connections");
  requireAtMost(all, "bodyLengthBytes", "bodiesLengthBytes");
  return { ...settings, limits: all };
}

/** Refuses a limit of one that is above the limit of all: it would have no effect. */
function requireAtMost<Name extends string>(limits: Readonly<Record<Name, number>>, one: Name, all: Name) {
  if (limits[one] <= limits[all]) return;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `limits.${one} is ${limits[one]}, above limits.${all}, which is ${limits[all]}`,
    { hint: `raise limits.${all} with it` },
  );
}
