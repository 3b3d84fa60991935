import { KvError } from "@kv/interface";
import { z } from "zod";
import type { InstanceSpec, Role } from "../instances/instance.js";
import type { InstancePool } from "../instances/instance-pool.js";
import { instanceSpecSchema, parseInstanceSpec } from "../instances/instance-spec.js";

const role = z.enum(["prefill", "decode"]);
const instance = instanceSpecSchema;

/** `type` is the name that vLLM's push proxy has for the role. */
const changeSchema = z.union([z.strictObject({ role, instance }), z.strictObject({ type: role, instance })]);

/** What can be done to an instance. */
export const INSTANCE_CHANGES = ["add", "drain", "remove"] as const;
/** One of `INSTANCE_CHANGES`. */
export type InstanceChange = (typeof INSTANCE_CHANGES)[number];

/**
 * Adds, drains or removes the instance that a JSON body names, and returns the state of its role's instances. Errors: `KV_REQUEST_INVALID`,
 * `KV_CONFIG_INVALID`, `KV_PROXY_NO_INSTANCE` (404).
 */
export async function changeInstance(
  change: InstanceChange,
  body: unknown,
  pools: Readonly<Record<Role, InstancePool>>,
): Promise<object> {
  const { role, spec } = readChange(body);
  const pool = pools[role];
  if (change === "add") pool.add(spec);
  else await beginChange(pool[change](spec));
  return pool.status();
}

/** The instance that a change names. */
export interface NamedInstance {
  /** Its pool. */
  readonly role: Role;
  /** Which it is. */
  readonly spec: InstanceSpec;
}

/** Reads the body of a change. Errors: `KV_REQUEST_INVALID`, `KV_CONFIG_INVALID`. */
export function readChange(body: unknown): NamedInstance {
  const result = changeSchema.safeParse(body);
  if (!result.success) {
    const problem = z.prettifyError(result.error);
    throw new KvError("KV_REQUEST_INVALID", `the body does not name a role and an instance: ${problem}`, {
      hint: 'send {"role": "prefill" or "decode", "instance": "host:port"}; "type" in place of "role" is the same',
    });
  }
  const { instance } = result.data;
  return {
    role: "role" in result.data ? result.data.role : result.data.type,
    spec: parseInstanceSpec(instance),
  };
}

/**
 * Waits until a change has begun, not for its end: a stream may last for an hour, and `/status` shows the requests in flight. A change of an unknown
 * instance rejects at once.
 */
async function beginChange(change: Promise<void>): Promise<void> {
  const later = new Promise<void>((resolve) => setImmediate(resolve));
  await Promise.race([change, later]);
  change.catch(() => {});
}
