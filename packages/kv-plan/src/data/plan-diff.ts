import type { EngineTransferPlan } from "@kv/plan";
import { planToDocument } from "./plan-document.js";

/** One member in which two plans differ. */
export interface PlanDifference {
  /** Path in the document. Regions go by name: `local.regions.model.layers.3.numBlocks`. */
  readonly path: string;
  /** Undefined where the first plan lacks the member. */
  readonly one: unknown;
  /** Undefined where the second plan lacks the member. */
  readonly other: unknown;
}

/**
 * The differences of two plans in document order, at most `limit` (default 1000). `addresses:
 * false` leaves out base addresses, device numbers and tables.
 * @throws The errors of `planToDocument`.
 */
export function diffPlans(
  one: EngineTransferPlan,
  other: EngineTransferPlan,
  options: { readonly limit?: number; readonly addresses?: boolean } = {},
): readonly PlanDifference[] {
  const found: PlanDifference[] = [];
  const { limit = 1000, addresses = true } = options;
  const skipped = addresses ? NONE : ADDRESSES;
  compare("", planToDocument(one), planToDocument(other), skipped, limit, found);
  return found;
}

const NONE: ReadonlySet<string> = new Set();
const ADDRESSES: ReadonlySet<string> = new Set([
  "baseAddress",
  "deviceId",
  "localTable",
  "remoteTable",
]);

function compare(
  path: string,
  one: unknown,
  other: unknown,
  skipped: ReadonlySet<string>,
  limit: number,
  found: PlanDifference[],
): void {
  if (found.length >= limit || Object.is(one, other)) return;
  if (!isTree(one) || !isTree(other)) {
    found.push({ path, one, other });
    return;
  }
  const [mine, theirs] = [members(one), members(other)];
  for (const key of new Set([...mine.keys(), ...theirs.keys()])) {
    if (skipped.has(key)) continue;
    compare(
      path === "" ? key : `${path}.${key}`,
      mine.get(key),
      theirs.get(key),
      skipped,
      limit,
      found,
    );
  }
}

function isTree(value: unknown): value is object {
  return typeof value === "object" && value !== null;
}

/** Regions go by name, so that a missing one does not make all others differ. */
function members(value: object): ReadonlyMap<string, unknown> {
  if (!Array.isArray(value)) return new Map(Object.entries(value));
  const named = value.every(
    (item) => isTree(item) && typeof (item as { name?: unknown }).name === "string",
  );
  return new Map(
    value.map(
      (item, index) =>
        [named ? String((item as { name: string }).name) : String(index), item] as const,
    ),
  );
}
