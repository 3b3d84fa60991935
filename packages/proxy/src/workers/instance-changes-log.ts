import { type InstancePool, instanceName, type Role } from "@kv/fleet";
import type { InstanceChange, NamedInstance } from "@kv/fleet/front-end";

/** The last change of an instance. */
export interface Changed extends NamedInstance {
  readonly change: InstanceChange;
  /** It was added after the start: a new worker does not know it. */
  readonly added: boolean;
}

/** What operators have changed since the start, for a worker that starts later. */
export class InstanceChangesLog {
  readonly #changed = new Map<string, Changed>();

  /** Records a change that the workers have made. */
  record(change: InstanceChange, { role, spec }: NamedInstance): void {
    const key = `${role} ${instanceName(spec)}`;
    const before = this.#changed.get(key);
    const known = before !== undefined && before.change !== "remove" ? before : undefined;
    if (change === "remove" && before?.added === true) this.#changed.delete(key);
    else if (change === "add")
      this.#changed.set(key, { change, role, spec: known?.spec ?? spec, added: true });
    else
      this.#changed.set(key, {
        change,
        role,
        spec: known?.spec ?? spec,
        added: known?.added ?? false,
      });
  }

  /** The changes as plain data. */
  list(): readonly Changed[] {
    return [...this.#changed.values()];
  }
}

/**
 * Makes the changes of `InstanceChangesLog.list` in the pools of a worker that has just started.
 */
export function replay(
  changes: readonly Changed[],
  pools: Readonly<Record<Role, InstancePool>>,
): void {
  for (const { change, role, spec, added } of changes) {
    const pool = pools[role];
    if (added && pool.find(spec) === undefined) pool.add(spec);
    if (change === "add" || pool.find(spec) === undefined) continue;
    pool[change](spec).catch(() => {});
  }
}
