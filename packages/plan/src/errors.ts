import { KvError } from "@kv/interface";

/** The two sides disagree: one form for all such errors, with both values in the message and in `details`. */
export function incompatible(what: string, local: unknown, remote: unknown, hint?: string): KvError {
  return new KvError("KV_PLAN_INCOMPATIBLE", `${what}: local ${show(local)}, remote ${show(remote)}`, {
    ...(hint === undefined ? {} : { hint }),
    details: { what, local, remote },
  });
}

/** Each side is sound, and this version has no way to serve the pair. */
export function unsupported(what: string, local: unknown, remote: unknown, hint?: string): KvError {
  return new KvError("KV_PLAN_UNSUPPORTED", `${what}: local ${show(local)}, remote ${show(remote)}`, {
    ...(hint === undefined ? {} : { hint }),
    details: { what, local, remote },
  });
}

function show(value: unknown): string {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}
