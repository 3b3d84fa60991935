import { KvError } from "@kv/interface";
import { z } from "zod";
import { instanceSpecSchema } from "../instances/instance-spec.js";
import { PAIRING_MODES } from "../pairing/pairing-settings.js";
import { ROUTING_NAMES } from "../routing/built-in-routings.js";

/** A duration in milliseconds, as a zod schema. */
export const milliseconds = z.number().positive().max(86_400_000);

/** Times of the connections to instances, and for which instances are left out, as members of a zod schema. */
export const instanceTimes = {
  /** To connect to an instance. */
  connectMs: milliseconds.default(5_000),
  /** How long an instance that could not be reached is left out, while there is another; doubles with each failure in a row. */
  coolDownMs: milliseconds.default(1_000),
  /** The longest cool-down. */
  maxCoolDownMs: milliseconds.default(30_000),
  /** How long an instance that is back from ejection takes a growing share of the requests. */
  slowReturnMs: milliseconds.default(10_000),
};

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
  /** The engines' `handshake_key_file`, where they have one: their side channels answer nobody else. */
  handshakeKeyFile: z.string().min(1).optional(),
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

const routingSchema = z.enum(ROUTING_NAMES);

/** The settings of every front end: which instances there are, how they are chosen, paired and checked. Members of a zod schema. */
export const fleetSettings = {
  /** `host:port` or `http(s)://host:port[/path]`, where a `/v1` at the end is dropped; `@RANK` after it is a data-parallel rank. */
  prefillers: z.array(instanceSpecSchema).default([]),
  /** As `prefillers`. */
  decoders: z.array(instanceSpecSchema).default([]),
  /**
   * A prompt with more uncached tokens than this has two legs. Without it, all have. A decode instance alone serves a shorter one, one that it has in
   * its prefix cache, and one that would wait for a prefill instance longer than the decode instance computes.
   */
  disaggregateAbove: z.number().int().nonnegative().optional(),
  /** The routing strategy of each role. */
  routing: z
    .strictObject({
      prefill: routingSchema.default("round-robin"),
      decode: routingSchema.default("round-robin"),
    })
    .prefault({}),
  /** Health checks. */
  health: healthSchema.prefault({}),
  /** Which prefill instances serve with which decode instances. */
  pairing: pairingSchema.prefault({}),
  /** A source of instances that come and go. */
  discovery: discoverySchema.optional(),
};

const times = z.object(instanceTimes);
const settings = z.object(fleetSettings);
/** The settings of `Fleet` with their defaults. */
export interface FleetSettings extends z.output<typeof settings> {
  /** As `instanceTimes`. */
  readonly timeouts: z.output<typeof times>;
}
/** The settings of `Fleet` as a program, a file or a command line gives them. */
export type FleetSettingsInput = z.input<typeof settings>;

/**
 * Checks settings against a zod schema and fills in defaults. `subject` begins the error's message, and `readme` is where the settings are described.
 * Errors: `KV_CONFIG_UNKNOWN_KEY`, `KV_CONFIG_INVALID`, with the name of each wrong setting.
 */
export function parseSettings<S extends z.ZodType>(
  schema: S,
  input: unknown,
  { subject, readme }: { readonly subject: string; readonly readme: string },
): z.output<S> {
  const result = schema.safeParse(input);
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

/** The value of a JSON file. Errors: `KV_CONFIG_INVALID` with the file's name. */
export function readJsonFile(path: string, readFile: (path: string) => string): unknown {
  try {
    return JSON.parse(readFile(path));
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `${path} cannot be read as JSON: ${(cause as Error).message}`, {
      cause,
    });
  }
}
