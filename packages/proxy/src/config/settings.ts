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
  mayForward,
  ms,
  parseSettings,
  setting,
  tlsFiles,
} from "@kv/fleet/front-end";
import { z } from "zod";

export const ADMIN_TOKEN = "KV_PROXY_ADMIN_TOKEN";
export const MAX_WORKERS = 64;

const policy = z.enum(["fail", "decode-computes"]).default("fail");

const policySchema = z.strictObject({
  missingKv: setting(
    policy,
  )`--missing-kv <policy>: when a prefill instance answers without KV parameters:
      502, or the decode instance computes the prompt`,
  unsplittable: setting(
    policy,
  )`--unsplittable <policy>: when a request cannot be split, as with beam search:
      400, or a decode instance serves it alone`,
});

const hostName = z.string().regex(/^[A-Za-z0-9._-]+$/);

const token = z.string().min(16).optional();
const upTo = (most: number) => z.number().int().min(1).max(most);
const port = upTo(65_535);
const size = upTo(65_536).optional();

const adminSchema = z.strictObject({
  host: setting(z.string().default("127.0.0.1"))`--admin-host <host>: address of the admin routes`,
  port: setting(
    listenerPort,
  )`--admin-port <port>: port of the admin routes and the page; 0 takes a free one
      (default: no admin routes)`,
  token: setting(token)`required as Authorization: Bearer; it must be set where
      admin.host is not the loopback (--admin-token-file) (default: ${ADMIN_TOKEN})`,
  allowedHosts: setting(
    z.array(hostName).default([]),
  )`--admin-allowed-host <name...>: names of this host that
      requests to the admin routes may have in their Host header`,
});

const origin = z
  .string()
  .regex(/^(\*|https?:\/\/[^/?#\s]+)$/, "give scheme://host[:port], without a path, or *");

const corsSchema = z.strictObject({
  origins: setting(
    z.array(origin).min(1),
  )`--cors-origin <origin...>: origins whose web pages may use the
      routes for clients; * for all`,
});

const instanceRoutesSchema = z.strictObject({
  token: setting(token)`required as Authorization: Bearer; without it web pages are
      refused (default: with the flag that of the admin routes)`,
});

/** An entry of `Allowlist`, which checks it. */
const allowEntry = z.string().min(1).max(256);

export const MAX_RANKS = 1024;

const sidecarSchema = z.strictObject({
  allow: setting(
    z.array(allowEntry).max(1024).default([]),
  )`--allow-prefill <entry...>: prefill instances that
      requests may name, beside those of discovery: addresses, blocks such as 10.0.0.0/8, names, *.SUFFIX or
      *; each may have :PORT`,
  prefillTls: setting(
    z.boolean().default(false),
  )`reach prefill instances by HTTPS (--enable-tls prefiller)`,
  tls: setting(
    tlsFiles.default(false),
  )`speak TLS on its own port: with a certificate that is made at the
      start, or with the PEM files certFile and keyFile, which are read again when they change (--secure-proxy, --cert-path)`,
  kvConnector: setting(
    z.enum(["nixlv2"]).optional(),
  )`--kv-connector <name>: the protocol of the legs, which always is nixlv2; mode chooses pull or push`,
  ecConnector: setting(
    z.string().optional(),
  )`--ec-connector <name>: no effect: prefill instances encode images themselves`,
  p2pPull: setting(
    z.boolean().default(false),
  )`engines run MultiConnector with an OffloadingConnector that has a P2P tier: the header
      x-kv-cache-source-host-port makes them take cached KV from that instance (--enable-p2p-pull)`,
  p2pConnectorPort: setting(
    port.default(7777),
  )`--p2p-connector-port <port>: port of the P2P tier of all instances; that of rank r is r above it`,
  kvPools: setting(
    z.array(z.string()).default([]),
  )`--kv-pool-peer <host:port...>: P2P tiers of the pools that the same header may name`,
  ranks: setting(
    z
      .strictObject({
        firstPort: port,
        count: upTo(MAX_RANKS),
      })
      .optional(),
  )`ports of the sidecars of all ranks: that of rank 0, and how many (--port, --data-parallel-size)`,
  kv: setting(
    z
      .strictObject({
        port: port.optional(),
        tpSize: size,
        ppSize: size,
      })
      .optional(),
  )`side-channel port, TP and PP size of all prefill instances (--prefill-side-channel-port, --prefill-tp-size,
      --prefill-pp-size)`,
});

const forwarded = headerName.refine(
  mayForward,
  "the proxy sets this header itself, or it belongs to one connection",
);

export const listenSchema = z.strictObject({
  host: setting(z.string().default("127.0.0.1"))`--host <host>: address to listen on`,
  port: setting(listenerPort.default(8_000))`--port <port>: port to listen on; 0 takes a free one`,
  workers: setting(upTo(MAX_WORKERS).default(1))`--workers <n>: processes that serve
      the port, one for each core; ${MAX_WORKERS} at most`,
  warmUpMs: setting(z.number().int().min(0).max(60_000).default(1_900))`--warm-up-ms <ms>: before it
      listens, the most time for requests to itself that make V8 compile their path; 0: none`,
});

const readbackSchema = z.strictObject({
  cachePercent: setting(upTo(90).default(25))`--readback-cache-percent <n>: the most
      of a decode instance's KV cache that ended turns may hold, in percent`,
  ttlMs: ms(
    450_000,
  )`--readback-ttl-ms <ms>: how long an ended turn may be read: decoder_kv_blocks_ttl of the
      decode instances (vLLM: 480 s) less a margin`,
  timeoutMs: ms(
    10_000,
  )`--readback-timeout-ms <ms>: time limit of a prefill leg that reads an ended turn, with
      the time in the queue; after it the prompt is computed`,
  minTokens: counted(
    64,
  )`an ended turn with fewer tokens is not kept: kv_recompute_threshold of the prefill
      instances`,
});

export const BODIES_PER_CLIENT_BYTES = 64 * 1024 * 1024;
export const ABANDONED_PREFILL_MS = 15_000;

const KIB = 1024;
const MIB = 1024 * KIB;

const limitsSchema = z.strictObject({
  bodyLengthBytes: counted(16 * MIB)`--body-limit-bytes <n>: a client's request body`,
  bodiesLengthBytes: counted(
    128 * MIB,
  )`--bodies-limit-bytes <n>: all request bodies together, until each has
      its answer; the flag sets half of it for one client`,
  bodiesPerClientLengthBytes: setting(count.optional())`the bodies of one client together (default:
      ${BODIES_PER_CLIENT_BYTES / MIB} MiB; of a sidecar all)`,
  ...jsonLimits,
  connections: setting(
    count.optional(),
  )`--max-connections <n>: clients' connections (default: half of the
      process's descriptors, a third unless the mode is pull; 10,000 at most)`,
  connectionsPerAddress: setting(
    count.optional(),
  )`--max-connections-per-address <n>: connections from one
      address, or from one IPv6 /64 network (default: half of all; of a sidecar all)`,
  pipelinedRequests: setting(
    z.number().int().nonnegative().default(16),
  )`requests on one connection that wait
      for the answers before them`,
  requestsInFlight: setting(
    count.optional(),
  )`--max-requests <n>: requests in flight; each prompt and copy
      counts (default: that of connections)`,
  requestsPerClient: setting(
    count.optional(),
  )`--max-requests-per-client <n>: requests in flight of one client
      (default: half of all; of a sidecar all)`,
  abandonedPrefillMs: setting(
    count.optional(),
  )`time that prefill instances spend on requests of a client which it
      leaves before their answers begin, within 30 s (default: ${ABANDONED_PREFILL_MS / 1000} s; of a sidecar none)`,
  clientHeader: setting(
    headerName.transform((name) => name.toLowerCase()).optional(),
  )`--client-header <name>: header by which a trusted front end names the client, for limits per client
      (default: the client is its address)`,
  headersLengthBytes: counted(32 * KIB)`a client's request line and headers`,
  prefillAnswerLengthBytes: counted(
    32 * MIB,
  )`a prefill instance's answer, which may repeat the prompt`,
  heldAnswerLengthBytes: counted(
    4 * MIB,
  )`the part of an answer that is checked before any of it leaves`,
  mergedAnswerLengthBytes: counted(64 * MIB)`all answers together that are merged into one`,
  eventLengthBytes: counted(MIB)`one event of a stream that is merged with others`,
  parts: counted(256)`prompts times copies (n) in one request`,
});

const timeoutsSchema = z.strictObject({
  connectMs: setting(
    instanceTimes.connectMs,
  )`--connect-timeout-ms <ms>: time limit to connect to an instance`,
  prefillMs: ms(
    300_000,
  )`--prefill-timeout-ms <ms>: time limit of the prefill leg, with the time in the queue`,
  firstByteMs: ms(
    300_000,
  )`--first-byte-timeout-ms <ms>: time limit for the decode leg's first byte`,
  stallMs: ms(
    120_000,
  )`--stall-timeout-ms <ms>: time limit between two chunks of an answer, and for a client to
      read some of it`,
  requestMs: ms(
    3_600_000,
  )`--request-timeout-ms <ms>: time limit of a whole request, with a client's time to read`,
  headersMs: ms(10_000)`time limit for a client to send the head of its request`,
  receiveMs: ms(60_000)`time limit for a client to send its request`,
  keepAliveMs: ms(
    75_000,
  )`how long an idle connection is kept, longer than clients and balancers keep theirs`,
  leaseMs: ms(
    25_000,
  )`--lease-ms <ms>: how long a prefill instance surely holds blocks: its kv_lease_duration
      (vLLM: 30 s) less a margin`,
  releaseMs: ms(10_000)`time limit of the request that frees blocks of an abandoned request`,
  coolDownMs: instanceTimes.coolDownMs,
  maxCoolDownMs: instanceTimes.maxCoolDownMs,
  slowReturnMs: instanceTimes.slowReturnMs,
  graceMs: ms(30_000)`--grace-ms <ms>: time for requests in flight to end at SIGTERM`,
});

/** The settings of the proxy, as a zod schema. */
export const proxySettingsSchema = z.strictObject({
  ...fleetSettings,
  ...group("Transfer", {
    mode: setting(
      z.enum(["pull", "push", "auto"]).default("pull"),
    )`--mode <mode>: how the KV is transferred:
        pull (NixlConnector), push (NixlPushConnector), or auto (by each prefill instance's answers)`,
    pushLegs: setting(
      z.enum(["at-once", "prefill-first"]).default("at-once"),
    )`--push-legs <order>: push: send
        both legs at once, or decode after prefill`,
    policy: setting(
      policySchema.prefault({}),
    )`whether a decode instance computes in place of an error`,
  }),
  ...group("Further turns", {
    readback: setting(
      readbackSchema.optional(),
    )`--readback: a prefill instance reads the KV of a turn that has
        ended from its decode instance, and computes only what is new (vLLM 0.33 with bidirectional_kv_xfer)`,
  }),
  ...group("Sidecar", {
    sidecar: setting(
      sidecarSchema.optional(),
    )`stands on the port of one decode instance; requests name their
        prefill instances in x-prefiller-host-port`,
  }),
  ...group("Limits", {
    limits: setting(limitsSchema.prefault({}))`what clients can make the proxy hold`,
  }),
  ...group("Timeouts", {
    timeouts: setting(timeoutsSchema.prefault({}))`how long things may take`,
  }),
  ...group("Clients", {
    forwardHeaders: setting(
      z.array(forwarded).default([]),
    )`--forward-header <name...>: further headers of
        clients that instances get, such as authorization`,
    exposeInstances: setting(
      z.boolean().default(false),
    )`--expose-instances: name instances and their
        addresses in errors to clients and in /status`,
    cors: setting(
      corsSchema.optional(),
    )`lets web pages of other origins use the routes for clients`,
    model: setting(
      z.string().min(1).max(256).optional(),
    )`-m, --model <name>: a model that instances must
        have to be added by /instances/add`,
    instanceRoutes: setting(
      instanceRoutesSchema.optional(),
    )`--instance-routes: serve /instances/add, /drain
        and /remove on the clients' port too, with the admin token where one is set`,
  }),
  ...group("Admin routes", {
    admin: setting(adminSchema.optional())`the admin routes and the page`,
  }),
});

/** A configuration file: settings and the address to listen on. */
export const proxyFileSchema = z.strictObject({
  ...listenSchema.shape,
  ...proxySettingsSchema.shape,
  $schema: setting(z.string().optional())`for editors`,
});

/** The settings as a program, a file or a command line gives them. Each member has a default. */
export type ProxySettingsInput = z.input<typeof proxySettingsSchema>;
/** The settings with their defaults. */
export type ProxySettings = z.output<typeof proxySettingsSchema>;

export type ProxyFileInput = z.input<typeof proxyFileSchema>;

/**
 * Checks settings and fills in defaults.
 * @throws `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting.
 */
export function readSettings(input: unknown): ProxySettings {
  const settings = parseSettings(proxySettingsSchema, input, {
    subject: "the proxy's settings are",
    readme: "@kv/proxy",
  });
  requireSidecar(settings);
  requirePull(settings);
  requireAdminToken(settings);
  requireRoomForBody(settings);
  return settings;
}

/**
 * Gateways are a sidecar's clients, and all count as one unless a header names the clients behind
 * them.
 */
export function isOneClient({ sidecar, limits }: ProxySettings): boolean {
  return sidecar !== undefined && limits.clientHeader === undefined;
}

export function bodiesPerClientBytes(settings: ProxySettings): number {
  const { bodiesPerClientLengthBytes: given, bodiesLengthBytes } = settings.limits;
  return given ?? (isOneClient(settings) ? bodiesLengthBytes : BODIES_PER_CLIENT_BYTES);
}

/** A body larger than its memory would always be refused, with a status that invites retries. */
function requireRoomForBody(settings: ProxySettings): void {
  const { bodyLengthBytes, bodiesLengthBytes: all } = settings.limits;
  const perClient = bodiesPerClientBytes(settings);
  if (bodyLengthBytes <= Math.min(perClient, all)) return;
  const name = perClient <= all ? "bodiesPerClientLengthBytes" : "bodiesLengthBytes";
  throw invalidConfig(
    `limits.bodyLengthBytes is ${bodyLengthBytes}, above limits.${name}, which is ${Math.min(perClient, all)}`,
    `raise limits.${name} with it`,
  );
}

function requireSidecar({ sidecar, decoders, prefillers }: ProxySettings): void {
  if (sidecar === undefined) return;
  if (decoders.length !== 1)
    throw invalidConfig(
      `a sidecar has one decode instance, and decoders names ${decoders.length}`,
      "start one sidecar beside each decode instance",
    );
  if (prefillers.length > 0)
    throw invalidConfig(
      "a sidecar takes no prefillers: requests name them in the header x-prefiller-host-port",
      "name the allowed ones in sidecar.allow (--allow-prefill)",
    );
}

/** vLLM's push connector refuses `bidirectional_kv_xfer`. */
function requirePull({ readback, mode }: ProxySettings): void {
  if (readback === undefined || mode === "pull") return;
  throw invalidConfig(
    `readback is set and mode is ${mode}: only engines that pull can read the KV of an ended turn`,
    "leave readback out, or set mode to pull",
  );
}

function requireAdminToken({ admin }: ProxySettings): void {
  if (
    admin === undefined ||
    admin.token !== undefined ||
    /^(127\.|::1$|localhost$)/.test(admin.host)
  )
    return;
  throw invalidConfig(
    `admin.host is ${admin.host}, which is not the loopback, but admin.token is not set`,
    "set a token of 16 characters or more, or keep the admin routes on 127.0.0.1",
  );
}
