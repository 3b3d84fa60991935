import type { Log } from "@kv/interface";
import { formatValue } from "@kv/protocol";
import { instanceName, type PairingStatus } from "../instances/instance.js";
import type { PairCheck } from "./check-pair.js";
import type { Entry, Kind } from "./kinds.js";

export function pairingStatus(entry: Entry, kind: Kind): PairingStatus {
  const { facts, error, address, stale } = entry;
  const partners = kind.fitting.reduce((sum, { entries }) => sum + entries.size, 0);
  const near = nearest(kind);
  let state: PairingStatus["state"] = facts === undefined ? "unverified" : "paired";
  if (partners === 0) state = kind.checks.size === 0 ? "alone" : "unpaired";
  let reason = noteOf(kind);
  if (state === "unverified") reason = error?.message ?? "its side channel is being read";
  if (near !== undefined) {
    const unread = facts === undefined && error !== undefined ? ` (${error.message})` : "";
    reason = differencesText(near) + unread;
  }
  return {
    state,
    partners,
    reason,
    differences: (near?.differences ?? []).map(({ factor, prefill, decode }) => ({
      factor,
      prefill: shown(prefill),
      decode: shown(decode),
    })),
    side_channel: address === undefined ? null : `${address.host}:${address.port}`,
    engine_id: facts?.engineId ?? null,
    compatibility_hash: facts?.compatibilityHash ?? null,
    vllm_version: facts?.vllmVersion ?? null,
    tp_size: facts?.tpSize ?? null,
    block_size: facts?.metadata.blockSize ?? null,
    kv_cache_layout: facts?.metadata.kvCacheLayout ?? null,
    transfer_mode: facts?.mode ?? null,
    stale,
  };
}

/** Logs only changes. */
export function logStatus(log: Log, entry: Entry): void {
  const { kind, instance, error, logged: before } = entry;
  if (entry.searching || entry.reading !== undefined || kind === undefined) return;
  const { state, reason, differences, partners } = pairingStatus(entry, kind);
  const key = state === "unpaired" || state === "unverified" ? `${state} ${reason}` : state;
  if (key === before) return;
  entry.logged = key;
  const fields = { role: instance.role, instance: instanceName(instance), reason };
  if (state === "unpaired") log.warn("instance-unpaired", { ...fields, differences });
  else if (state === "unverified")
    log.warn("instance-unverified", { ...fields, hint: error?.hint });
  else if (state === "paired" && before !== "")
    log.info("instance-paired", { ...fields, partners });
}

function noteOf({ checks }: Kind): string | null {
  const noted = [...checks.values()].find(({ fits, note }) => fits && note !== undefined);
  return noted?.note ?? null;
}

/** Undefined for a kind that fits one. */
function nearest({ checks, fitting }: Kind): PairCheck | undefined {
  if (fitting.length > 0) return undefined;
  return [...checks.values()].sort(
    (one, other) => one.differences.length - other.differences.length,
  )[0];
}

function differencesText({ differences, note }: PairCheck): string {
  const text = differences
    .slice(0, 4)
    .map(
      ({ factor, prefill, decode }) =>
        `${factor} is ${shown(prefill)} at prefill and ${shown(decode)} at decode`,
    )
    .join("; ");
  return note === undefined ? text : `${text} (${note.slice(0, 300)})`;
}

function shown(value: unknown): string {
  return typeof value === "string" ? value.slice(0, 200) : formatValue(value);
}

export function refusalText(
  kinds: readonly Kind[],
  isAmong: (entry: Entry) => boolean,
  isPartner: (entry: Entry) => boolean,
): string | undefined {
  const texts = new Set<string>();
  for (const kind of kinds) {
    if (!kind.has(isAmong)) continue;
    for (const [other, check] of kind.checks) {
      if (!other.has(isPartner)) continue;
      if (check.fits) return undefined;
      texts.add(differencesText(check));
    }
  }
  if (texts.size === 0) return undefined;
  const more = texts.size > 3 ? `, and ${texts.size - 3} more reasons` : "";
  return [...texts].slice(0, 3).join(", or ") + more;
}
