import { KvError } from "@kv/interface";
import { unknownKeys } from "@kv/program/unknown-keys";
import { z } from "zod";
import { instanceSpecSchema } from "../instances/instance-spec.js";
import { PAIRING_MODES } from "../pairing/pairing-settings.js";
import { ROUTING_NAMES } from "../routing/built-in-routings.js";
import { invalidConfig } from "./invalid-config.js";
import { counted, group, ms, setting } from "./settings-table.js";

/** Times for connecting to instances and leaving them out, as members of a zod schema. */
export const instanceTimes = {
  connectMs: ms(5_000)`time limit to connect to an instance`,
  coolDownMs: ms(
    1_000,
  )`how long an instance is left out that could not be reached; doubles each time`,
  maxCoolDownMs: ms(30_000)`how long such an instance is left out at most`,
  slowReturnMs: ms(10_000)`how long an instance that is back from ejection gets a growing share`,
};

const healthSchema = z.strictObject({
  intervalMs: setting(
    z.number().nonnegative().max(86_400_000).default(5_000),
  )`--health-interval-ms <ms>: time
      between two health checks; 0 disables them`,
  timeoutMs: ms(3_000)`time limit of a health check`,
  path: setting(z.string().startsWith("/").default("/health"))`the route that a check requests`,
  failures: counted(
    2,
  )`failed checks in a row that eject an instance; the first good one takes it back`,
});

const outlierDetectionSchema = z.strictObject({
  consecutiveFailures: setting(
    z.number().int().nonnegative().default(5),
  )`failed requests in a row that eject an instance while another one of its role does not fail; 0: none do`,
  baseEjectionTimeMs: ms(
    30_000,
  )`how long such an instance is left out, until one request at a time tries it; each try that fails adds as much`,
  maxEjectionTimeMs: ms(300_000)`how long it is left out at most`,
});

const pairingSchema = z.strictObject({
  mode: setting(
    z.enum(PAIRING_MODES).default("lenient"),
  )`--pairing <mode>: what pairs with an instance whose
      side channel was not read: all (lenient), those of its label, or none (strict); off reads no side
      channel`,
  timeoutMs: ms(3_000)`time limit of one reading of a side channel`,
  refreshMs: ms(60_000)`time between two readings of an engine that shows no sign of a restart`,
  handshakeKeyFile: setting(
    z.string().min(1).optional(),
  )`--handshake-key-file <file>: file with the key of
      the engines' side channels, where they have one (handshake_key_file)`,
});

const portName = z.union([z.number().int().min(1).max(65_535), z.string().min(1).max(63)]);
const roles = <S extends z.ZodType>(schema: S) =>
  z.strictObject({ prefill: schema, decode: schema });
const label = () => setting(z.string().min(1).max(317).optional());
const serviceName = z.string().regex(/^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$/);

const kubernetesSchema = z.strictObject({
  kubeconfig: setting(z.string().optional())`kubeconfig file (default: that of the environment)`,
  context: setting(z.string().optional())`context of the kubeconfig (default: its current one)`,
  namespace: setting(
    serviceName.optional(),
  )`--kubernetes-namespace <name>: namespace of the pods (default:
        that of the context or the pod)`,
  podSelector: setting(z.string().min(1))`--kubernetes-pods <selector>: follow the pods with
        these labels, such as app=vllm; their roles are by the label llm-d.ai/role (needs
        @kubernetes/client-node)`,
  port: setting(
    z.union([portName, roles(portName)]).optional(),
  )`HTTP port of the pods, by name or number; one,
        or one for each role (default: http)`,
  sideChannelPort: setting(portName.optional())`port of the pods' side channels`,
  roleLabel: label()`label with the role of a pod (default: llm-d.ai/role)`,
  revisionLabel: label()`label that differs for pods that do not pair, until their side channels are read`,
  dataParallelLabel: label()`label with the number of data-parallel ranks; each is an instance`,
  ipFamily: setting(
    z.union([z.literal(4), z.literal(6)]).optional(),
  )`4 or 6, for pods with addresses of both
        (default: that of the first address)`,
});

/** The setting `discovery.kubernetes`. */
export type KubernetesSettings = z.input<typeof kubernetesSchema>;

const dnsSchema = z.strictObject({
  prefill: setting(
    z.string(),
  )`--dns-prefill <name>: follow the DNS name of the prefill instances: host:port,
      or SRV records`,
  decode: setting(z.string())`--dns-decode <name>: follow the DNS name of the decode instances`,
});

const discoverySchema = z
  .strictObject({
    file: setting(z.string().optional())`--discovery-file <file>: follow a JSON file that lists the
        instances`,
    dns: setting(dnsSchema.optional())`follow DNS names, whose addresses are instances`,
    kubernetes: setting(kubernetesSchema.optional())`follow pods in a Kubernetes cluster`,
    intervalMs: ms(5_000)`time between two reads of a file or of DNS`,
  })
  .refine(
    (given) =>
      [given.file, given.dns, given.kubernetes].filter((one) => one !== undefined).length === 1,
    "give one of file, dns and kubernetes",
  );

const kvSourcesSchema = z.strictObject({
  pools: setting(
    z.array(z.string()).default([]),
  )`--kv-pool <url...>: admin addresses (host:port) of kv-pool, from which prefill instances fetch
      prefixes`,
  tierPort: setting(
    z.number().int().min(1).max(65_535).optional(),
  )`--kv-tier-port <port>: port of the instances' P2P tier (a further one for each data-parallel
      rank), from which prefill instances fetch prefixes (default: no instance is a source)`,
});

const routingSchema = z.enum(ROUTING_NAMES).default("round-robin");

/** The settings of every front end, as members of a zod schema. */
export const fleetSettings = {
  ...group("Instances", {
    prefillers: setting(
      z.array(instanceSpecSchema).default([]),
    )`-p, --prefill <url...>: prefill instances:
        host:port or http(s)://host:port; @RANK after it is a data-parallel rank`,
    decoders: setting(
      z.array(instanceSpecSchema).default([]),
    )`-d, --decode <url...>: decode instances`,
  }),
  ...group("Discovery", {
    discovery: setting(discoverySchema.optional())`a source of instances that come and go`,
  }),
  ...group("Health checks", {
    health: setting(healthSchema.prefault({}))`health checks of instances`,
    outlierDetection: setting(
      outlierDetectionSchema.prefault({}),
    )`which instances are left out because their requests fail`,
  }),
  ...group("Pairing", {
    pairing: setting(
      pairingSchema.prefault({}),
    )`which prefill instances serve with which decode instances`,
  }),
  ...group("Routing", {
    routing: setting(
      z
        .strictObject({
          prefill: setting(
            routingSchema,
          )`--prefill-routing <strategy>: how prefill instances are chosen`,
          decode: setting(
            routingSchema,
          )`--decode-routing <strategy>: how decode instances are chosen`,
        })
        .prefault({}),
    )`how instances are chosen`,
    kvSources: setting(
      kvSourcesSchema.prefault({}),
    )`where prefill instances with vLLM's P2P tier fetch the start of a prompt`,
    disaggregateAbove: setting(
      z.number().int().nonnegative().optional(),
    )`--disaggregate-above <tokens>: a
        decode instance alone serves prompts with at most so many tokens that it does not have cached
        (default: two legs for all)`,
  }),
};

const times = z.object(instanceTimes);
const settings = z.object(fleetSettings);
/** The settings of `Fleet` with their defaults. */
export interface FleetSettings extends z.output<typeof settings> {
  /** In addition to those always forwarded. */
  readonly forwardHeaders: readonly string[];
  readonly timeouts: z.output<typeof times>;
}
/** The settings of `Fleet` as given. */
export type FleetSettingsInput = z.input<typeof settings>;

/**
 * Checks settings and fills in defaults. `subject` begins the error's message, and `readme`
 * describes the settings.
 *
 * @throws `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting.
 */
export function parseSettings<S extends z.ZodType>(
  schema: S,
  input: unknown,
  { subject, readme }: { readonly subject: string; readonly readme: string },
): z.output<S> {
  const result = schema.safeParse(input, { error: unknownKeys });
  if (result.success) return result.data;
  const problems = result.error.issues.map(
    (issue) => `${issue.path.join(".") || "settings"}: ${issue.message}`,
  );
  const unknown = result.error.issues.some((issue) => issue.code === "unrecognized_keys");
  throw new KvError(
    unknown ? "KV_CONFIG_UNKNOWN_KEY" : "KV_CONFIG_INVALID",
    `${subject} not valid: ${problems.join("; ")}`,
    { hint: `each setting is described in the README of ${readme}`, details: { problems } },
  );
}

/**
 * Reads a file of JSON.
 *
 * @throws `KV_CONFIG_INVALID` with the file's name.
 */
export function readJsonFile(path: string, readFile: (path: string) => string): unknown {
  try {
    return JSON.parse(readFile(path));
  } catch (cause) {
    throw invalidConfig(
      `${path} cannot be read as JSON: ${(cause as Error).message}`,
      undefined,
      cause,
    );
  }
}
