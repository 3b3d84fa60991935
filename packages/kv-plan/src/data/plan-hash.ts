import type { EngineTransferPlan } from "@kv/plan";
import type { PlanDocument } from "./plan-document.js";
import { planToDocument } from "./plan-document.js";
import { sha256Hex } from "./sha256.js";

/**
 * SHA-256 in hex over a plan's canonical JSON, the same on any machine. `addresses: false` (default
 * true) leaves out base addresses, device numbers and tables, so that two runs of one deployment
 * hash alike.
 * @throws The errors of `planToDocument`.
 */
export function hashPlan(
  plan: EngineTransferPlan,
  options: { readonly addresses?: boolean } = {},
): string {
  const document = planToDocument(plan);
  return sha256Hex(
    canonicalJson(options.addresses === false ? withoutAddresses(document) : document),
  );
}

function withoutAddresses(document: PlanDocument): unknown {
  const rank = (one: PlanDocument["local"]) => ({
    ...one,
    deviceId: 0,
    regions: one.regions.map(({ deviceId: _device, ...region }) => ({ ...region, baseAddress: 0 })),
  });
  return {
    ...document,
    local: rank(document.local),
    remote: rank(document.remote),
    sources: document.sources.map(({ lists, ...source }) => ({
      ...source,
      lists: lists.map(({ localListKey }) => localListKey),
    })),
  };
}

/**
 * Keys sorted by code unit, no spaces, JavaScript's numbers, no undefined members. Throws a
 * TypeError for values without JSON.
 */
export function canonicalJson(value: unknown): string {
  if (value === null || typeof value === "string" || typeof value === "boolean")
    return JSON.stringify(value);
  if (typeof value === "number") {
    if (!Number.isFinite(value)) throw new TypeError(`${value} has no JSON`);
    return JSON.stringify(value);
  }
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (typeof value !== "object") throw new TypeError(`a ${typeof value} has no JSON`);
  const members = Object.entries(value)
    .filter(([, member]) => member !== undefined)
    .sort(([one], [other]) => (one < other ? -1 : 1))
    .map(([key, member]) => `${JSON.stringify(key)}:${canonicalJson(member)}`);
  return `{${members.join(",")}}`;
}
