import {
  count,
  counted,
  fleetSettings,
  group,
  headerName,
  instanceTimes,
  invalidConfig,
  jsonLimits,
  listenerPort,
  ms,
  parseSettings,
  setting,
  tlsFiles,
} from "@kv/fleet/front-end";
import { z } from "zod";

const MIB = 1024 * 1024;

const limitsSchema = z.strictObject({
  connections: counted(1_024)`connections of gateways`,
  connectionsPerAddress: setting(
    count.optional(),
  )`connections of one address (default: half of all)`,
  requestsPerConnection: counted(10_000)`requests at once on one connection`,
  requestsInFlight: counted(20_000)`requests in flight, until the end of their answers`,
  requestsPerDecode: setting(
    count.optional(),
  )`--shed-above <n>: answer with 429 when each decode instance has
      so many requests in flight (default: never)`,
  bodyLengthBytes: counted(16 * MIB)`--body-limit-bytes <n>: a client's request body`,
  bodiesLengthBytes: counted(
    256 * MIB,
  )`--bodies-limit-bytes <n>: all request bodies together, until they are
      passed on`,
  ...jsonLimits,
  messageLengthBytes: counted(4 * MIB)`a message of a gateway`,
  subsetEndpoints: counted(20_000)`endpoints of a subset hint`,
});

const timeoutsSchema = z.strictObject({
  ...instanceTimes,
  receiveMs: ms(60_000)`time limit for a body to arrive`,
  requestMs: ms(
    3_600_000,
  )`time limit of a gateway's stream: a whole request, until the end of its answer`,
  idleMs: ms(300_000)`how long a connection without a request is kept`,
  drainMs: setting(
    z.number().nonnegative().max(86_400_000).default(2_000),
  )`--drain-ms <ms>: how long
      health says NOT_SERVING after SIGTERM, before requests are refused`,
  graceMs: ms(30_000)`--grace-ms <ms>: time for requests in flight to end after drainMs`,
});

const metricsSchema = z.strictObject({
  host: setting(
    z.string().default("127.0.0.1"),
  )`--metrics-host <host>: address of /metrics, /status and
      /health`,
  port: setting(
    listenerPort,
  )`--metrics-port <port>: port of /metrics, /status and /health over HTTP; 0 takes
      a free one`,
});

export const listenSchema = z.strictObject({
  host: setting(z.string().default("127.0.0.1"))`--host <host>: address to listen on`,
  port: setting(
    listenerPort.default(9_002),
  )`--port <port>: port of ext_proc and gRPC health; 0 takes a free
      one`,
});

/** The zod schema of the picker's settings. */
export const pickerSettingsSchema = z.strictObject({
  ...fleetSettings,
  ...group("Answers", {
    fallbacks: setting(
      z.number().int().nonnegative().max(16).default(1),
    )`--fallbacks <n>: instances named
        beside the chosen ones, for retries`,
    unsplittable: setting(
      z.enum(["fail", "decode-computes"]).default("fail"),
    )`--unsplittable <policy>: when a
        request cannot be split, as with beam search: 400, or a decode instance serves it alone`,
    forwardHeaders: setting(
      z.array(headerName).default([]),
    )`--forward-header <name...>: clients' headers that
        instances get with requests for token ids`,
    exposeInstances: setting(
      z.boolean().default(false),
    )`--expose-instances: name instances and their
        addresses in errors to clients`,
  }),
  ...group("Limits", {
    limits: setting(limitsSchema.prefault({}))`what gateways can make the picker hold`,
  }),
  ...group("Timeouts", {
    timeouts: setting(timeoutsSchema.prefault({}))`how long things may take`,
  }),
  tls: setting(
    tlsFiles.default(true),
  )`speak TLS, with a certificate that is made at the start, or with the
      PEM files certFile and keyFile, which are read again when they change (--tls-cert, --tls-key, --no-tls)`,
  ...group("Health and metrics", {
    healthPort: setting(
      listenerPort.optional(),
    )`--health-port <port>: port of gRPC health without TLS, for
        probes of Kubernetes`,
    metricsServer: setting(
      metricsSchema.optional(),
    )`serves /metrics, /status and /health over HTTP`,
  }),
});

export const pickerFileSchema = z.strictObject({
  ...listenSchema.shape,
  ...pickerSettingsSchema.shape,
  $schema: setting(z.string().optional())`for editors`,
});

/** The settings as given; each has a default. */
export type PickerSettingsInput = z.input<typeof pickerSettingsSchema>;
/** The settings with their defaults. */
export type PickerSettings = Omit<z.output<typeof pickerSettingsSchema>, "limits"> & {
  readonly limits: z.output<typeof limitsSchema> & { readonly connectionsPerAddress: number };
};

/** @throws `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting. */
export function readSettings(input: unknown): PickerSettings {
  const settings = parseSettings(pickerSettingsSchema, input, {
    subject: "the picker's settings are",
    readme: "@kv/epp",
  });
  const { limits } = settings;
  const connectionsPerAddress = limits.connectionsPerAddress ?? Math.ceil(limits.connections / 2);
  const all = { ...limits, connectionsPerAddress };
  requireAtMost(all, "connectionsPerAddress", "connections");
  requireAtMost(all, "bodyLengthBytes", "bodiesLengthBytes");
  return { ...settings, limits: all };
}

/** A limit of one above the limit of all would have no effect. */
function requireAtMost<Name extends string>(
  limits: Readonly<Record<Name, number>>,
  one: Name,
  all: Name,
) {
  if (limits[one] <= limits[all]) return;
  throw invalidConfig(
    `limits.${one} is ${limits[one]}, above limits.${all}, which is ${limits[all]}`,
    `raise limits.${all} with it`,
  );
}
