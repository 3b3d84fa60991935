import { KvError } from "@kv/interface";
import { unknownKeys } from "@kv/program/unknown-keys";
import { z } from "zod";
import type { InstanceSpec, InstanceStatus, Role } from "../instances/instance.js";
import { instanceSpecSchema, parseInstanceSpec } from "../instances/instance-spec.js";
import type { InstanceGet } from "../pairing/engine-facts.js";
import type { InstancePools } from "../routing/instance-pool.js";
import { invalidConfig } from "../settings/invalid-config.js";

const role = z.enum(["prefill", "decode"]);
const instance = instanceSpecSchema;

/** vLLM's push proxy calls the role `type`. */
const changeSchema = z.union([
  z.strictObject({ role, instance }),
  z.strictObject({ type: role, instance }),
]);

/** What can be done to an instance. */
export const INSTANCE_CHANGES = ["add", "drain", "remove"] as const;
/** One of `INSTANCE_CHANGES`. */
export type InstanceChange = (typeof INSTANCE_CHANGES)[number];

/** What a change is applied to. */
export interface ChangedInstances {
  readonly pools: InstancePools;
  readonly get: InstanceGet;
  readonly timeoutMs: number;
  /** @default any */
  readonly model?: string | undefined;
}

/**
 * Applies a change from a JSON body. Returns the state of the role's instances.
 *
 * @throws `KV_REQUEST_INVALID`, `KV_CONFIG_INVALID`, `KV_PROXY_NO_INSTANCE` (404).
 */
export async function changeInstance(
  change: InstanceChange,
  body: unknown,
  instances: ChangedInstances,
): Promise<InstanceStatus[]> {
  const named = readChange(body);
  const { role, spec } = named;
  const pool = instances.pools[role];
  if (change === "add") {
    if (pool.find(spec) === undefined) await requireServer(named, instances);
    pool.add(spec);
  } else await beginChange(pool[change](spec));
  return pool.status();
}

/** @throws `KV_CONFIG_INVALID` if the instance does not answer with the required model. */
async function requireServer(
  { role, spec: { url } }: NamedInstance,
  { get, timeoutMs, model }: ChangedInstances,
): Promise<void> {
  const refused = (why: string, cause?: unknown) =>
    invalidConfig(
      `the ${role} instance ${url} is not added: ${why}`,
      `add it when GET ${url}/v1/models answers with its models`,
      cause,
    );
  const { status, body } = await get({ role, url, path: "/v1/models", timeoutMs }).catch(
    (cause: Error) => {
      throw refused(`it does not answer (${cause.message})`, cause);
    },
  );
  // Only clients have its key.
  if (status === 401 || status === 403) return;
  if (status !== 200) throw refused(`GET /v1/models was answered with status ${status}`);
  const ids = modelsIn(body);
  if (ids === undefined) throw refused("its answer to GET /v1/models is no list of models");
  if (model !== undefined && !ids.includes(model))
    throw refused(`it serves ${ids.join(", ") || "no model"}, and not ${model}`);
}

const modelsSchema = z.object({ data: z.array(z.object({ id: z.string() })) });

function modelsIn(body: string): string[] | undefined {
  try {
    return modelsSchema.parse(JSON.parse(body)).data.map(({ id }) => id);
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
  const result = changeSchema.safeParse(body, { error: unknownKeys });
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

/** Waits only for the start, since a stream may last an hour. */
async function beginChange(change: Promise<void>): Promise<void> {
  const later = new Promise<void>((resolve) => setImmediate(resolve));
  await Promise.race([change, later]);
  change.catch(() => {});
}
