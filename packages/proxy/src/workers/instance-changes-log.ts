import { type InstancePool, instanceName, type Role } from "@kv/fleet";
import type { InstanceChange, NamedInstance } from "@kv/fleet/front-end";

export interface Changed extends NamedInstance {
  readonly change: InstanceChange;
  /** Added after the start, so a new worker does not know it. */
  readonly added: boolean;
}

/** Operators' changes since the start, for workers that start later. */
export class InstanceChangesLog {
  readonly #changed = new Map<string, Changed>();

  record(change: InstanceChange, { role, spec }: NamedInstance): void {
    const key = `${role} ${instanceName(spec)}`;
    const before = this.#changed.get(key);
    const known = before !== undefined && before.change !== "remove" ? before : undefined;
    if (change === "remove" && before?.added === true) this.#changed.delete(key);
    else {
      const added = change === "add" || known?.added === true;
      this.#changed.set(key, { change, role, spec: known?.spec ?? spec, added });
    }
  }

  list(): readonly Changed[] {
    return [...this.#changed.values()];
  }
}

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
