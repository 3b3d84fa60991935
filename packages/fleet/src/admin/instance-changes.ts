import { KvError } from "@kv/interface";
import { z } from "zod";
import type { InstanceSpec, Role } from "../instances/instance.js";
import { instanceSpecSchema, parseInstanceSpec } from "../instances/instance-spec.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import type { InstancePool } from "../routing/instance-pool.js";

const role = z.enum(["prefill", "decode"]);
const instance = instanceSpecSchema;

/** `type` is the name that vLLM's push proxy has for the role. */
const changeSchema = z.union([
  z.strictObject({ role, instance }),
  z.strictObject({ type: role, instance }),
]);

/** What can be done to an instance. */
export const INSTANCE_CHANGES = ["add", "drain", "remove"] as const;
/** One of `INSTANCE_CHANGES`. */
export type InstanceChange = (typeof INSTANCE_CHANGES)[number];

/** The instances that a change is made to. */
export interface ChangedInstances {
  readonly pools: Readonly<Record<Role, InstancePool>>;
  readonly get: InstanceGet;
  readonly timeoutMs: number;
  /** A model that a new instance must have. @default any */
  readonly model?: string | undefined;
}

/**
 * Adds, drains or removes the instance that a JSON body names, and returns the state of its role's
 * instances. A new one is asked for its models first.
 *
 * @throws `KV_REQUEST_INVALID`, `KV_CONFIG_INVALID`, `KV_PROXY_NO_INSTANCE` (404).
 */
export async function changeInstance(
  change: InstanceChange,
  body: unknown,
  instances: ChangedInstances,
): Promise<object> {
  const named = readChange(body);
  const { role, spec } = named;
  const pool = instances.pools[role];
  if (change === "add") {
    if (pool.find(spec) === undefined) await requireServer(named, instances);
    pool.add(spec);
  } else await beginChange(pool[change](spec));
  return pool.status();
}

/**
 * Asks a new instance for its models.
 *
 * @throws `KV_CONFIG_INVALID` for an instance that does not answer with its models, or lacks the
 * one that it must have.
 */
async function requireServer(
  { role, spec: { url } }: NamedInstance,
  { get, timeoutMs, model }: ChangedInstances,
): Promise<void> {
  const refused = (why: string, cause?: unknown) =>
    new KvError("KV_CONFIG_INVALID", `the ${role} instance ${url} is not added: ${why}`, {
      hint: `add it when GET ${url}/v1/models answers with its models`,
      cause,
    });
  const { status, body } = await get({ role, url, path: "/v1/models", timeoutMs }).catch(
    (cause: Error) => {
      throw refused(`it does not answer (${cause.message})`, cause);
    },
  );
  // It wants a key, which only clients have.
  if (status === 401 || status === 403) return;
  if (status !== 200) throw refused(`GET /v1/models was answered with status ${status}`);
  const { success, data: list } = z
    .object({ data: z.array(z.object({ id: z.string() })) })
    .safeParse(json(body));
  if (!success) throw refused("its answer to GET /v1/models is no list of models");
  const ids = list.data.map(({ id }) => id);
  if (model !== undefined && !ids.includes(model))
    throw refused(`it serves ${ids.join(", ") || "no model"}, and not ${model}`);
}

function json(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** The instance that a change names. */
export interface NamedInstance {
  readonly role: Role;
  readonly spec: InstanceSpec;
}

/**
 * Reads the body of a change.
 *
 * @throws `KV_REQUEST_INVALID`, `KV_CONFIG_INVALID`.
 */
export function readChange(body: unknown): NamedInstance {
  const result = changeSchema.safeParse(body);
  if (!result.success) {
    const problem = z.prettifyError(result.error);
    throw new KvError(
      "KV_REQUEST_INVALID",
      `the body does not name a role and an instance: ${problem}`,
      {
        hint: 'send {"role": "prefill" or "decode", "instance": "host:port"}; "type" in place of "role" is the same',
      },
    );
  }
  const { instance } = result.data;
  return {
    role: "role" in result.data ? result.data.role : result.data.type,
    spec: parseInstanceSpec(instance),
  };
}

/**
 * Waits until a change has begun, not for its end: a stream may last for an hour, and `/status`
 * shows the requests in flight. A change of an unknown instance rejects at once.
 */
async function beginChange(change: Promise<void>): Promise<void> {
  const later = new Promise<void>((resolve) => setImmediate(resolve));
  await Promise.race([change, later]);
  change.catch(() => {});
}
